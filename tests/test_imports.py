"""Parts know only what lies below them, and each heavy dependency has one door. References: the imports of every file
as `ast` sees them, the modules that a fresh interpreter really loads, and a count of lines.
"""

import ast
import sys

import pytest
import run_helpers as helpers

FILES = sorted(path for part in ("dflash", "data_prep", "train") for path in (helpers.ROOT / part).rglob("*.py"))
HEAVY = {
    "deepspeed": {"train/engine.py"},
    "wandb": {"train/log.py"},
    "hydra": {"data_prep/run.py", "train/run.py"},
    "omegaconf": {"data_prep/run.py", "train/run.py"},
    "httpx": {"data_prep/regenerate.py", "train/server.py", "train/diagnose.py"},
    "datasets": {"data_prep/prompts.py"},
    "matplotlib": {"train/plots.py"},
}
FORBIDDEN = {
    "dflash": {"data_prep", "train", "hydra", "omegaconf", "datasets", "deepspeed", "wandb", "httpx", "matplotlib"},
    "data_prep": {"train", "deepspeed", "wandb"},
    "train": {"tests"},
}


def imported(path):
    """Top-level names of all that a file imports, wherever in the file the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0] if node.level == 0 else path.relative_to(helpers.ROOT).parts[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(helpers.ROOT)))
def test_import_direction(path):
    name, names = str(path.relative_to(helpers.ROOT)), set(imported(path))
    assert not names & FORBIDDEN[path.relative_to(helpers.ROOT).parts[0]]
    for heavy, doors in HEAVY.items():
        assert heavy not in names or name in doors, f"{name} imports {heavy}"


@pytest.mark.parametrize("name", ["model.py", "generate.py"])
def test_what_an_export_ships_needs_torch_and_transformers_only(name):
    path = helpers.ROOT / "dflash" / name
    names = set(imported(path)) - set(sys.stdlib_module_names)
    assert names <= {"torch", "transformers", "dflash"}
    relative = {node.module for node in ast.walk(ast.parse(path.read_text())) if getattr(node, "level", 0)}
    assert relative <= {"model", "generate"}


def test_dflash_pulls_in_nothing_heavy():
    parts = ", ".join(f"dflash.{path.stem}" for path in FILES if path.parent.name == "dflash" and path.stem[0] != "_")
    heavy = ["hydra", "omegaconf", "datasets", "deepspeed", "wandb", "data_prep", "train"]
    code = f"import sys, dflash, {parts}; print([name for name in {heavy} if name in sys.modules])"
    done = helpers.run("-c", code)
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.xfail(
    strict=True,
    reason="7,700 lines, 5,600 of them code: pipeline, launchers, formats, doctor, evaluators and baselines",
)
def test_the_project_stays_short():
    assert sum(len(path.read_text().splitlines()) for path in FILES) < 4000
