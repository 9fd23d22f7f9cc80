"""What counts as a secret, and what only resembles one."""

import json

import pytest

from memfit.masking import mask, mask_line


@pytest.mark.parametrize(
    "text",
    ["--tokens=5", "--token-budget 5", "tokenizer=bert", "--lr 0.1", "--keys=a", "--password-file=/a", "a=b", "key=5"],
)
def test_what_only_resembles_a_secret_is_shown(text):
    assert mask([text, *text.split()]) == [text, *text.split()]


@pytest.mark.parametrize(
    "text",
    ["--token={}", "TOKEN={}", "--wandb_api_key={}", "params.hub-token={}", "hubToken: {}", "AWS_SECRET_ACCESS_KEY={}",
     '{{"password": "{}"}}', "Authorization: Bearer {}", "postgres://me:{}@host/db", "--secret '{}'"],
)  # fmt: skip
def test_a_secret_is_known_by_its_name_or_its_form(text):
    masked = mask(text.format("s3cret"))
    assert "s3cret" not in masked
    assert "***" in masked
    for known in ("hf_" + "a" * 30, "ghp_" + "a" * 36, "sk-" + "a" * 40, "AKIA" + "A" * 16):
        assert mask(f"x {known}") == "x ***"


@pytest.mark.proves("S4-23")
@pytest.mark.parametrize(
    "word",
    ["PGPASSWORD=abc", "--mytoken=abc", "MYSQL_PWD=abc", "--api-keys=abc", "AccountKey=abc", "https://me:a@abc@host/",
     "Authorization: Basic abc"],
)  # fmt: skip
def test_common_names_and_forms_of_secrets_are_masked(word):
    assert "abc" not in mask([word])[0]


@pytest.mark.parametrize("word", ["--max-tokens=512", "--tokenizer=t5", "--passes=2", "--keys=3", "PWD=/home/me"])
def test_what_only_sounds_like_a_secret_is_shown(word):
    assert mask([word]) == [word]


@pytest.mark.parametrize(
    ("kept", "secret"),
    [
        ("https://discord.com/api/webhooks/", "1234567890/aB3d-E5fG7hI9"),
        ("https://discordapp.com/api/v10/webhooks/", "1234567890/aB3d-E5fG7hI9"),
        ("https://hooks.slack.com/services/", "T00/B00/xyz"),
        ("GET /b/k?X-Amz-Signature=", "0123abcdef"),
        ("", "AIza" + "b" * 35),
        ("wandb: error 401 for key ", "0f1e" * 10),
        ("", "wandb_v1_" + "k" * 40),
        ("pip install git+https://me:", "p@ss"),
        ("Authorization: Basic ", "bWU6cGFzcw=="),
        ("", "ghp_" + "a" * 36),
        ("", "ASIA" + "A" * 16),
    ],
)
def test_known_forms_are_masked_in_texts_and_what_is_around_them_stays(kept, secret):
    around = f"step 3 {kept}{secret}{'@host' if 'git+' in kept else ''}"
    assert mask(around) == around.replace(secret, "***")
    line = json.dumps({"text": around, "step": 3}, separators=(",", ":"))
    assert json.loads(mask_line(line)) == {"text": around.replace(secret, "***"), "step": 3}
    assert json.loads(mask(line, by_name=False))["text"] == around.replace(secret, "***")


def test_the_other_half_of_a_pair_of_amazons_is_masked_too():
    pair = ["--id", "AKIA" + "Q7XJ2MZL4TPWNRVB", "--with", "kZ8mQx2vLp/sRtYw5uJn7bHc3dFg9eAi1oKqXyZw"]
    assert mask(pair) == ["--id", "***", "--with", "***"]
    assert mask(pair[2:]) == pair[2:]  # forty letters alone may be a commit


@pytest.mark.parametrize(
    "text",
    ["tokenizer.pad_token = </s>", "--eos-token x", "Basic blocks: 12 internationalization", "loss_per_token: 0.5",
     "0f1e" * 10, "task-specific-weights-of-layer", "hf_transformers_version_check_of_it", "http://host:8080/path"],
)  # fmt: skip
def test_texts_of_trainings_stay_as_they_are(text):
    assert mask(text) == text


def test_a_line_without_a_secret_is_not_taken_apart():
    line = json.dumps({"kind": "step", "tokens": 512, "tokens_per_second": 3.5, "text": "fold_1 epoch 3: loss 0.5"})
    assert mask_line(line) is line
    assert json.loads(mask_line('{"api_key": "abc", "last_token": 5, "seed_token": 7}')) == {
        "api_key": "***", "last_token": 5, "seed_token": 7,
    }  # fmt: skip


def test_a_path_under_the_name_of_a_secret_is_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path))
    monkeypatch.setenv("LONG_TOKEN", "x9" * 4000)  # longer than a name of a file
    assert mask(f"reads {tmp_path}/key.json {'x9' * 4000}") == f"reads {tmp_path}/key.json ***"


@pytest.mark.parametrize(
    "words",
    [
        ["--password=correct horse"],
        ["--password", "correct horse"],
        ["--password=a&b;horse"],
        ["--password=a'horse"],
        ['--password=a"horse b'],
        ["--key", "horse"],
        ["--key=horse"],
        ["--pass", "horse"],
        ["--pwd=horse b"],
        ["--auth", "me:horse"],
        ["--azure-storage-key", "horse"],
        ["--env=MY_PASSWORD=horse"],
        ["--env", "MY_PASSWORD=a horse"],
        ["--header=Authorization: token horse"],
        ["-H", "X-Api-Key: horse"],
        ["--sas-token=sv=1&sig=horse"],
        ["--cookie", "session=horse"],
        ["sh", "-c", "run --password='a horse' --lr 1"],
        ["sh", "-c", r"run --password=a\ horse --lr 1"],
        ["sh", "-c", "run '--password=a horse' --lr 1"],
        ["sh", "-c", "docker run --env=MY_PASSWORD=horse image"],
        ["sh", "-c", "curl -H 'Authorization: token horse' host"],
        ['{"a": {"password": "b \\"horse"}}'],
        ["eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMhorse.c2ln"],
        ["sk_" + "live_" + "a1B2" * 6 + "horse"],
        ["rk_" + "test_" + "a1B2" * 6 + "horse"],
        ["pypi-AgEIcHlwaS5vcmcC" + "a1" * 9 + "horse"],
        ["https://a.blob.core.windows.net/c?sv=1&sig=horse%3D"],
        ["https://api.telegram.org/bot123456789:AAh1" + "b" * 26 + "horse/getMe"],
        ["123456:ABC-DEF1234ghIkl-zyx57W2v1uhorse"],
        ["-----BEGIN RSA PRIVATE KEY-----\nhorse\n-----END RSA PRIVATE KEY-----"],
    ],
)
def test_what_a_flag_or_its_form_names_is_masked_to_its_end(words):
    shown = mask(words)
    assert "horse" not in str(shown) and "***" in str(shown)
    assert ("--lr 1" in str(shown)) == ("--lr 1" in str(words))
    assert "horse" not in mask({"command": words, "text": f"unknown argument: {' '.join(words)}"})["text"]


def test_a_parameter_that_is_a_part_of_a_secret_and_a_line_for_the_shell_are_masked_too():
    found = {"command": ["./train", "--token=pre-abc"], "params": {"t": "abc", "lr": "0.1"}}
    assert mask(found) == {"command": ["./train", "--token=***"], "params": {"t": "***", "lr": "0.1"}}
    found = {"DB_PASSWORD": "abc", "command": ["sh", "-c", "export HF_TOKEN='a b'; run --secret abc --lr 1"]}
    shown = ["sh", "-c", "export HF_TOKEN=***; run --secret *** --lr 1"]
    assert mask(found) == {"DB_PASSWORD": "***", "command": shown}


def test_a_line_of_a_process_has_no_secret_of_its_own_command(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--password=correct horse", "--lr", "0.1"])
    line = json.dumps({"text": "bad arguments: --password=correct horse --lr 0.1"}, separators=(",", ":"))
    assert json.loads(mask_line(line)) == {"text": "bad arguments: --password=*** --lr 0.1"}
    monkeypatch.setattr("sys.argv", ["train.py", "--pass", "training"])
    assert mask("memfit resume /home/me/training/runs") == "memfit resume /home/me/training/runs"


@pytest.mark.parametrize(
    "text",
    ["--input-key question", "--monitor-key=val_loss", "--key-file /a", "key=5", "pass: 3", "exited with sig=9",
     "Authorized by Cookiecutter", "--use-token --lr 0.1", "config: signature=3", "author=me"],
)  # fmt: skip
def test_names_of_columns_and_words_of_logs_stay(text):
    assert mask([text, *text.split()]) == [text, *text.split()]


def test_a_part_of_a_word_is_no_secret():
    line = "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
    assert mask(line) == line
    assert mask(["--password", "training", "--out", "pretraining_2"])[3] == "pretraining_2"


def test_lines_of_dashes_and_quotes_take_no_longer_than_their_length():
    for text in ("-" * 100_000, "password='" * 9_000, "a:" * 50_000, "token=\\" * 9_000):
        assert len(mask(text)) <= len(text)
