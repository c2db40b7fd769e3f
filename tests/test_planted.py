"""Every planted bug has its place in the code, and tests that exist; run.py plants them."""

import ast
import functools
import shlex
import subprocess
import sys

import pytest
from planted.run import FOUND, ROOT, TOOLS, missing_for, read_plants

PLANTS = read_plants()


@functools.cache
def functions_in(file):
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_bug_can_be_planted(plant):
    assert plant.planted(ROOT) != (ROOT / plant.file).read_text()
    for check in shlex.split(plant.check):
        file, *names = check.partition("[")[0].split("::")
        assert not names or names[-1] in functions_in(file), check


def test_a_bug_without_its_place_is_an_error(tmp_path):
    plant = PLANTS[0]._replace(file="source.c", old="a = b;", new="a = c;")
    for text in ("", "a = b; a = b;"):
        (tmp_path / "source.c").write_text(text)
        with pytest.raises(LookupError, match=plant.name):
            plant.planted(tmp_path)
    (tmp_path / "source.c").write_text("if (x) a = b;")
    assert plant.planted(tmp_path) == "if (x) a = c;"


def test_each_tool_has_a_bug_to_see():
    found = {plant.under: plant for plant in PLANTS if plant.under in TOOLS}
    assert found.keys() == set(TOOLS)
    assert all("[cuda" in plant.check for plant in found.values())


@pytest.mark.skipif(not missing_for("memcheck"), reason="there is a GPU")
def test_what_takes_a_gpu_is_skipped_without_one():
    names = [plant.name for plant in PLANTS if plant.under in TOOLS]
    command = [sys.executable, ROOT / "tests" / "planted" / "run.py"]
    done = subprocess.run([*command, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in names:
        assert f"\n| {name} | " in done.stdout
    assert done.stdout.count("skipped: there is no") == len(names)
    done = subprocess.run([*command, "--gpu"], capture_output=True, text=True)
    assert done.returncode == 1 and "there is no" in done.stderr


@pytest.mark.parametrize(
    ("printed", "is_report"),
    [
        ("= 1 passed =\n========= ERROR SUMMARY: 0 errors\n", False),
        ("= 1 passed =\n========= ERROR SUMMARY: 12 errors\n", True),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", False),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n", True),
    ],
)
def test_a_report_is_known(printed, is_report):
    assert bool(FOUND.search(printed)) == is_report
