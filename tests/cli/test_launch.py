"""``memfit launch``: what it says of files that it cannot read as a training."""


def test_a_config_of_memfit_run_is_told_how_it_is_launched(memfit, config):
    done = memfit("launch", config())
    assert done.exit_code == 2 and "is a config of memfit run" in done.err
    assert f"command: memfit run {config()}" in done.err and "known:" not in done.err


def test_the_known_names_are_told_once(memfit, tmp_path):
    (tmp_path / "job.yaml").write_text("name: a\ncommand: python train.py\nfoo: 1\nqqq: 2\n")
    done = memfit("launch", "job.yaml")
    assert done.exit_code == 2 and done.err.count("known:") == 1
    assert "foo is no setting (job.yaml:3); qqq is no setting (job.yaml:4): known:" in done.err
