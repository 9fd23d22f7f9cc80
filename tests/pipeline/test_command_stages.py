"""A config whose stages are commands: what their placeholders stand for."""

import memfit


def test_units_come_from_a_result_and_meet_and_a_join_gets_all_of_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folds = '{"folds": [{"fold": "a", "rows": 1}, {"fold": "b", "rows": 2}]}'
    stages = {
        "prepare": {"run": f"echo '{folds}' > {{dir}}/result.json"},
        "fold": {"each": "fold in prepare.folds", "run": "echo {unit} {fold} {rows} > {dir}/own"},
        "score": {"each": "fold in prepare.folds", "run": ["cp", "{fold}/own", "{dir}/copy"]},
        "double": {"each": "n in params.sizes", "run": "echo '{\"twice\": '$(({n} * 2))'}' > {dir}/result.json"},
        "join": {"needs": ["score"], "run": "for one in {score}; do cat $one/copy; done > {dir}/all"},
    }
    result = memfit.run({"experiment": "commands", "params": {"sizes": [3, 5]}, "stages": stages})
    assert result.state == "completed"
    assert (result.path / "checkpoints/stage_join/all").read_text() == "a a 1\nb b 2\n"
    assert [result.metrics[job]["twice"] for job in ("double_3", "double_5")] == [6, 10]
