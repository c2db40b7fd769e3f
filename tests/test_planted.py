"""Every planted bug has its place in the code, and tests that exist; run.py plants them."""

import ast
import functools
import shlex

import pytest
from planted.run import ROOT, read_plants

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
