"""Keys in files, in the git history and in .env are found, and their values are never printed."""

import subprocess

import pytest

pytest.importorskip("detect_secrets")

from memfit.doctor import scan_secrets
from memfit.errors import UsageError
from memfit.masking import mask

# Put together here, so that this file holds none.
AWS_KEY = "AKIA" + "IOSFODNN7EXAMPLQ"
GITHUB_TOKEN = "ghp_" + "wWPw5k4aXcaT4fNP0UcnZwJUVFk6LO0pINUx"


def git(folder, *words):
    who = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("import torch\nprint(torch.rand(3))\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def problems(folder):
    return [one for one in scan_secrets(folder) if one.verdict != "ok"]


def test_a_repository_without_secrets_is_well_and_says_how_much_was_read(repository):
    checks = scan_secrets(repository)
    assert {one.verdict for one in checks} == {"ok"}
    assert [one.finding for one in checks] == ["no secret in 1 file", "no secret in 1 commit"]


def test_a_key_in_a_file_that_git_would_add_is_found_by_line_and_its_value_is_not_printed(repository):
    (repository / "train.py").write_text(f"import os\n\nKEY = '{AWS_KEY}'\n")
    (one,) = problems(repository)
    assert (one.verdict, one.finding) == ("problem", "AWS Access Key in train.py:3")
    assert AWS_KEY not in str(one.to_dict())


def test_a_key_that_a_later_commit_removed_is_found_once_in_the_history(repository):
    for text in (f"token = '{GITHUB_TOKEN}'\n", "token = None\n", f"token = '{GITHUB_TOKEN}'  # again\n", "pass\n"):
        (repository / "my notes.py").write_text(text)
        git(repository, "add", ".")
        git(repository, "commit", "-qm", "change")
    (one,) = problems(repository)
    assert one.finding.startswith("GitHub Token in my notes.py in commit ") and one.source == "git history"
    assert GITHUB_TOKEN not in str(one.to_dict()) and "revoke" in one.remedy


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("Discord Webhook", "https://discord.com/api/webhooks/" + "123456789012345678/aB3dE5fG7hI9"),
        ("Hugging Face Token", "hf_" + "QmZxTrWvLkJhGfDsApOiUyTrEwQaZxCvBn"),
        ("W&B Key", "wandb login " + "0123456789abcdef" * 2 + "01234567"),
        ("Signed URL", "https://b.s3.amazonaws.com/x?X-Amz-Signature=" + "0a1b2c3d" * 8),
    ],
)
def test_a_form_that_is_masked_and_not_known_to_detect_secrets_is_found_by_its_kind(repository, kind, value):
    (repository / "n.yaml").write_text(f"url: {value}\n")
    assert mask(value) != value
    assert [one.finding for one in problems(repository)] == [f"{kind} in n.yaml:1"]
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "add")
    git(repository, "rm", "-q", "n.yaml")
    git(repository, "commit", "-qm", "remove")
    (one,) = problems(repository)
    assert one.finding.startswith(f"{kind} in n.yaml in commit ") and value not in str(one.to_dict())


def test_a_value_that_is_marked_and_a_file_that_git_ignores_are_left_out(repository):
    (repository / "train.py").write_text(f"KEY = '{AWS_KEY}'\n")
    git(repository, "commit", "-qam", "a value of a test")
    (repository / "train.py").write_text(f"KEY = '{AWS_KEY}'  # pragma: allowlist secret\n")
    (repository / ".gitignore").write_text("*.key\n")
    (repository / "our.key").write_text(f"KEY = '{AWS_KEY}'\n")
    assert problems(repository) == []


def test_an_env_file_is_kept_from_git_and_from_others(repository):
    (repository / ".env").write_text("NOTIFY_URL=\n")
    (repository / ".env").chmod(0o644)
    assert [one.finding for one in problems(repository)] == ["git does not ignore it", "others may read it (mode 644)"]
    (repository / ".gitignore").write_text(".env\n")
    (repository / ".env").chmod(0o600)
    assert problems(repository) == []
    git(repository, "add", "-f", ".env")
    assert [one.finding for one in problems(repository)] == ["it is in git"]


def test_a_folder_outside_of_git_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is in no git repository"):
        scan_secrets(tmp_path)
