"""Every command and every line of Python in README and guides that needs no network runs as it is written there."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torchvision
from accelerate.state import AcceleratorState, GradientState
from click.testing import CliRunner
from PIL import Image
from ruamel.yaml import YAML
from torch.distributed.run import get_args_parser

from prunekit.channels.rules.rule import RULES
from prunekit.cli import cli
from prunekit.recipe.loading import load
from prunekit.settings.deployment import Target
from prunekit.settings.job import JobSettings
from prunekit.settings.train import DistillSettings
from prunekit.settings.weight_pattern import PatternSettings
from prunekit.training.callbacks.distillation import feature_paths

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = ROOT / "prunekit" / "guide"
PAGES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(GUIDE.rglob("*.md")))}
TESTED_ELSEWHERE = ("sweeps.md", "trainers.md", "yolo.md")
"""Pages whose Python needs other packages."""
WITH_DATA = "five_minutes.md"
"""The page whose commands and Python work on the reader's own folder of images, tested by itself."""
GALLERY = "gallery"
"""The folder of the page whose commands take a quarter of an hour; `tests/test_gallery.py` reads them."""
OF_OTHERS = ("ultralytics", "captum")
"""Packages that blocks of Python need and that tests of pages go without; YOLO is tested with its own page."""
SHORTER = (
    ("  name: resnet34\n  arguments:\n    zero_init_residual: true", "  name: resnet8\n  zoo: cifar"),
    ("image_size: 32", "image_size: 8"),
    ("epochs: 10", "epochs: 0"),
    ("epochs: 4", "epochs: 1"),
    ("threads: 2", "threads: 1\n\ncalibration:\n  images: 64"),
    ("batches: [1, 16]", "batches: [1]\n  repeats: 5"),
)
"""What is changed in the recipe's copy that the commands run on; the commands themselves are as written."""
NARROW = ("torchvision.models.resnet18(", "torchvision.models.shufflenet_v2_x0_5(")
"""A network with a `conv1` and an `fc` too; fits of its layers take no seconds."""
SHALLOW = "torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10)"
FEW_LAYERS = (
    "torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, 2), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3, 2), "
    "torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 10))"
)
"""A network whose fits take no seconds, many of which a page makes."""
SMALLER = {
    "how_much.md": (
        ("torchvision.models.resnet18(num_classes=10)", FEW_LAYERS),
        ("max_drop=0.05", "max_drop=0.3"),  # of random weights, which answer by little
        ("max_drop=0.1", "max_drop=0.4"),
    ),
    "faster.md": (("torchvision.models.resnet18(num_classes=10)", SHALLOW),),
    "own_loop.md": (NARROW,),
    "blocks.md": (("resnet18(num_classes=10)", "resnet50(num_classes=10, width_per_group=4)"),),
    "tasks.md": (
        ("smaller = pk.prune(detector", "detector.transform.fixed_size = 96, 96; smaller = pk.prune(detector"),
    ),
}
"""What is changed in the Python of pages: networks and images are smaller, and drops of theirs larger."""


def blocks(language: str, pages: Iterable[Path] = PAGES) -> list[str]:
    """Those of the README first, as far as their Python needs no other package."""
    found = [block for page in pages for block in re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.S)]
    return [block for block in found if language != "python" or not any(name in block for name in OF_OTHERS)]


def commands(pages: Iterable[Path]) -> list[list[str]]:
    """All `prunekit ...` commands, in order, as argument lists without the program's name."""
    whole = (re.sub(r"\s*\\\n\s*", " ", block) for block in blocks("sh", pages))  # a line may go on in the next
    lines = [line for block in whole for line in block.splitlines()]
    found = [re.search(r"(?:^|/)prunekit ([^#]*)", line) for line in lines]
    return [shlex.split(match.group(1).replace("<", "{").replace(">", "}")) for match in found if match]


OF_CHECKOUT = [path for path in PAGES if path.name != WITH_DATA and path.parent.name != GALLERY]
IN_PYTHON = [path for path in OF_CHECKOUT if path.name not in TESTED_ELSEWHERE and blocks("python", [path])]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    recipe = (ROOT / "recipes" / "resnet34.yaml").read_text(encoding="utf-8")
    for old, new in SHORTER:
        assert recipe.count(old) == 1, old
        recipe = recipe.replace(old, new)
    (folder / "recipes").mkdir()
    (folder / "recipes" / "resnet34.yaml").write_text(recipe, encoding="utf-8")
    images = folder / "path" / "to" / "images"
    images.mkdir(parents=True)
    for file in (folder / "photo.png", images / "photo.png"):  # the user's own
        Image.new("RGB", (40, 30), (200, 120, 40)).save(file)
    return folder


def run(arguments: list[str], runs: Path) -> str:
    """What a command prints, in the working directory, on the first run there is."""
    found = sorted(runs.glob("2*"))
    filled = [argument.replace("{time}", found[0].name if found else "") for argument in arguments]
    result = CliRunner().invoke(cli, filled)
    # A timing on a busy machine may exceed a gate, or say that tiny images run no faster.
    allowed = {0, 1} if "--max-latency-ms" in filled or filled[0] in ("finetune", "prune") else {0}
    assert result.exit_code in allowed, f"prunekit {shlex.join(filled)}\n{result.output}"
    assert "error:" not in result.output, result.output
    return result.output


def execute(pages: Sequence[Path], folder: Path) -> dict[str, Any]:
    """The names that pages leave whose Python is run as one script, from a file, so that its source can be read."""
    names: dict[str, Any] = {"__name__": "__main__"}
    code = blocks("python", pages)
    for old, new in (change for page in pages for change in SMALLER.get(page.name, ())):
        assert any(old in block for block in code), old
        code = [block.replace(old, new) for block in code]
    for number, block in enumerate(code):
        script = folder / f"block{number}.py"
        script.write_text(block, encoding="utf-8")
        exec(compile(block, str(script), "exec"), names)
    return names


def assert_printed(out: str) -> None:
    """What the README shows below its first Python is what that prints, but for figures: the images are random."""
    (shown,) = blocks("text", [ROOT / "README.md"])
    wanted, printed = ([re.sub(r"[\d.]+(e-\d+)?| +", " ", line) for line in text.splitlines()] for text in (shown, out))
    assert [line for line in wanted if line not in printed] == []


@pytest.fixture
def _as_before() -> Iterator[None]:
    """What Accelerate keeps of a process is no other test's, and no rule that a page registers stays."""
    rules = set(RULES)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in set(RULES) - rules:
        del RULES[name]


def test_every_kind_of_command_is_shown() -> None:
    shown = commands(PAGES)
    assert {arguments[0] for arguments in shown} == set(cli.list_commands(None))  # type: ignore[arg-type]
    assert shown[0] == ["finetune", "recipes/resnet34.yaml"]


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
def test_commands_run_as_written(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    options = {name for one in cli.get_command(None, "evaluate").params for name in one.opts}  # type: ignore[arg-type,union-attr]
    for arguments in commands(OF_CHECKOUT):
        if "--tasks" in arguments:  # whose data is on the web
            assert {one for one in arguments if one.startswith("--")} <= options
        else:
            run(arguments, checkout / "runs" / "resnet34")
    assert (next((checkout / "runs" / "resnet34").glob("2*")) / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort", "_as_before")
@pytest.mark.parametrize("page", IN_PYTHON, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft reads it
def test_python_runs_as_written(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each page by itself: what it uses it imports and makes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "tests" / "examples")
    names = execute([page], tmp_path)
    if page.name == "README.md":
        assert_printed(capsys.readouterr().out)
    if page.name == "choosing.md":
        assert names["repaired"].repair.after < names["repaired"].repair.before


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
def test_five_minutes_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own drawings, fewer of them; its commands, with short trainings."""
    monkeypatch.chdir(tmp_path)
    (page,) = (path for path in PAGES if path.name == WITH_DATA)
    draw, *use = blocks("python", [page])
    assert draw.count("range(100)") == 1
    exec(compile(draw.replace("range(100)", "range(10)"), "draw.py", "exec"), names := {"__name__": "__main__"})
    shorter = ["baseline.epochs=0", "finetune.epochs=1", "latency.batches=[1]", "latency.repeats=5"]
    for arguments in commands([page]):
        run([*arguments, *(shorter if arguments[0] == "finetune" else [])], tmp_path / "runs" / "mine")
    for block in use:
        exec(compile(block, "use.py", "exec"), names)
    assert isinstance(names["small"], torchvision.models.ResNet)
    assert type(names["loaded"]) is names["Shapes"]
    assert (tmp_path / "small.onnx").is_file()


def test_setup_commands_stand_alone_and_match_continuous_integration() -> None:
    lines = [line for block in blocks("sh", [ROOT / "README.md"]) for line in block.splitlines()]
    setup = [line for line in lines if line.startswith("python3 -m venv")]
    assert len(setup) == 2
    assert setup[0].endswith("prunekit finetune recipes/resnet34.yaml")
    assert setup[1].endswith("-m pytest")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    pattern = re.search(r"grep -m1 -E '([^']*)' README.md", script)
    assert pattern is not None
    assert [line for line in README.splitlines() if re.search(pattern.group(1), line)] == [setup[1]]


def test_examples_for_clusters_are_what_torchrun_takes() -> None:
    """SLURM's and Kubernetes' lines with their variables filled in; names and numbers fit together."""
    (slurm,) = (block for block in blocks("bash") if "#SBATCH" in block)
    (kubernetes,) = (block for block in blocks("yaml") if "kind: Job" in block)
    assert 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" ' in slurm  # which srun has not from sbatch since SLURM 22.05
    service, job = YAML(typ="safe").load_all(kubernetes)
    pods = job["spec"]["template"]["spec"]
    lines = (re.search(r"(torchrun [^']*)'", slurm)[1].replace("\\\n", " "), pods["containers"][0]["args"][0])  # type: ignore[index]
    for line in lines:
        filled = re.sub(r"\$(SLURM_NODEID|JOB_COMPLETION_INDEX)", "1", line).replace("$SLURM_NNODES", "2")
        parsed = get_args_parser().parse_args(
            shlex.split(filled.replace("$MASTER_ADDR", "first"))[1:][line is lines[1] :]
        )
        assert (parsed.nnodes, parsed.node_rank, parsed.nproc_per_node, parsed.master_port) == ("2", 1, "8", 29500)
        assert (parsed.module, parsed.training_script, parsed.training_script_args[0]) == (True, "prunekit", "finetune")
    assert f"--master-addr={job['metadata']['name']}-0.{pods['subdomain']} " in lines[1]
    assert pods["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert f"--nproc-per-node={pods['containers'][0]['resources']['limits']['nvidia.com/gpu']} " in lines[1]


def test_links_exist_and_lead_to_every_guide() -> None:
    link = re.compile(r"\]\((?!https:)([^)#]+)\)")
    found = {(path.parent / to).resolve() for path, page in PAGES.items() for to in link.findall(page)}
    assert found >= set(PAGES) - {ROOT / "README.md"}
    assert all(path.exists() for path in found), found


def shown(block: str, folder: Path) -> JobSettings:
    """The job of a recipe that has what a page shows."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"name: shown\nmodel: {{name: resnet34, weights: IMAGENET1K_V1}}\n{block}", encoding="utf-8")
    return load(recipe)


def test_settings_in_yaml_are_those_of_recipes(tmp_path: Path) -> None:
    depth, latency, gradual, training, unlabeled, exports, aware, zeros = (
        block
        for name in ("blocks", "faster", "finetune", "onnx_int8", "single_weights")
        for block in blocks("yaml", [GUIDE / "how_to" / f"{name}.md"])
    )
    assert (shown(depth, tmp_path).prune.depth, shown(depth, tmp_path).prune.min_blocks) == ("auto", 1)
    assert shown(depth, tmp_path).prune.budget.measured
    assert shown(exports, tmp_path).export == ("onnx", "openvino")
    assert shown(exports, tmp_path).quantize == "int8"
    assert shown(aware, tmp_path).finetune.fake_quantize == "int8"
    prune = shown(latency, tmp_path).prune
    assert prune.budget.measured
    assert prune.target == Target("onnxruntime")
    assert shown(zeros, tmp_path).prune.pattern == PatternSettings("2:4")
    assert shown(gradual, tmp_path).prune.pattern == PatternSettings("unstructured", 0.8)
    job = shown(training, tmp_path)
    assert isinstance(job.finetune.distill, DistillSettings)
    assert job.finetune.distill.features is not None
    assert (job.finetune.lr, job.data.labels, shown(unlabeled, tmp_path).data.labels) == ("auto", True, False)
    model = torchvision.models.resnet34()
    assert feature_paths(model, job.finetune.distill) == ["layer1", "layer2", "layer3", "layer4"]


def test_the_picture_of_before_and_after_is_what_its_script_draws() -> None:
    results = ROOT / "benchmarks" / "results"
    rows = json.loads((results / "main_job.json").read_text(encoding="utf-8"))["rows"]
    picture = runpy.run_path(str(ROOT / "benchmarks" / "before_after.py"))["picture"]
    assert picture(rows) == (results / "before_after.svg").read_text(encoding="utf-8")


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120
