"""Tasks of lm-eval, by which the field compares language models: a dense and a pruned model side by side."""

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prunekit.backends.folders.model_file import CODE
from prunekit.backends.standalone import Standalone
from prunekit.data.texts import training_text
from prunekit.errors import DataError, ModelError, PrunekitError, UsageError, nearest, raised_as, with_type
from prunekit.hooks.wrappers import unwrapped
from prunekit.models.hugging_face import builder
from prunekit.models.names import CONFIG
from prunekit.reading.text_files import read_json
from prunekit.settings.inputs import ModelSettings
from prunekit.settings.job import JobSettings
from prunekit.tasks.task import get_task
from prunekit.training.compatibility import require_tokens
from prunekit.utils.availability import import_of_extra
from prunekit.utils.context import set_mode
from prunekit.utils.display import Displayed, Table, plural

TOKENIZER = "tokenizer_config.json"
GRAM = 13
"""Words in a row that two texts share only if one has been copied (Brown et al. 2020, appendix C)."""
PUNCTUATION = re.compile(r"[^\w\s]|_")


@dataclass(frozen=True)
class Asked:
    """The tasks that are asked for, and how they are run."""

    names: Sequence[str]  # of tasks, groups and tags of lm-eval; `*` stands for any letters
    folder: Path | None = None  # with more tasks, YAML each, whose `!function` is code that runs
    few_shot: int | None = None  # solved examples before each question; None: what the task says
    limit: int | None = None  # samples of each task, the first ones; None: all
    batch: int = 8  # requests computed at once


@dataclass(frozen=True, eq=False, repr=False)
class TaskScores(Displayed):
    """The scores of one or two models at tasks of lm-eval."""

    model: str  # its name
    measured: list[dict[str, Any]]  # see `rows`
    about: dict[str, Any]  # the version of lm-eval, the device, and the limit
    notes: tuple[str, ...]

    def figures(self) -> dict[str, Any]:
        """Return all scores as plain data, with the version of lm-eval."""
        return {"model": self.model, **self.about, "tasks": self.measured}

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each task and metric: `scores` and `errors`, standard ones, are by the name of the model."""
        return self.measured

    def _headline(self) -> str:
        return f"{self.model}: tasks of lm-eval {self.about['lm_eval']}, each value ± its standard error"

    def _parts(self) -> Iterator[str | Table]:
        yield self._headline()
        names, rows = list(self.measured[0]["scores"]), []
        for row in self.measured:
            errors = {name: "" if error is None else f" ± {error:.4f}" for name, error in row["errors"].items()}
            cells = [f"{row['scores'][name]:.4f}{errors[name]}" for name in names]
            copied = [row["in_calibration"]] if "in_calibration" in row else []
            rows.append((row["task"], row["metric"], row["few_shot"], row["samples"], *copied, *cells))
        known = ["in calibration"] if "in_calibration" in self.measured[0] else []
        yield Table(("task", "metric", "shots", "samples", *known, *names), rows, text=("metric",))
        yield from self.notes


def evaluate_tasks(
    models: Mapping[str, nn.Module], name: str, tokenizer: Any, asked: Asked, device: torch.device,
    notes: tuple[str, ...] = (), job: JobSettings | None = None,
) -> TaskScores:  # fmt: skip
    """Return the scores of models of transformers at tasks of lm-eval, by the name of the model.

    Samples that share `GRAM` words in a row with the training text of the job are counted.
    """
    library = import_of_extra("lm_eval", "language", "evaluate --tasks", UsageError)
    made = {key: harness_model(model.to(device), tokenizer, asked.batch) for key, model in models.items()}
    failed = f"lm-eval cannot run {', '.join(asked.names)}: "
    how = {"num_fewshot": asked.few_shot, "limit": asked.limit}
    with raised_as(DataError, failed, reason=_reason, passing=UsageError):
        manager = _task_manager(asked)
        tasks = known_tasks(asked.names, manager)
        found = {
            key: library.simple_evaluate(model, tasks=tasks, task_manager=manager, **how) for key, model in made.items()
        }
    if asked.limit is not None:
        notes = (*notes, f"only the first {plural(asked.limit, 'sample')} of each task: not to compare with others'")
    about, rows = {"lm_eval": version("lm_eval"), "device": str(device), "limit": asked.limit}, [*_rows(found)]
    if job is not None and get_task(job.task).texts is not None and job.data.source in ("text", "huggingface"):
        samples = next(iter(found.values()))["samples"]
        try:
            copied = in_calibration(samples, training_text(job.known_data, get_task(job.task)))
        except PrunekitError as error:
            notes = (*notes, f"in calibration: nobody has looked, as the text of the run cannot be read: {error}")
        else:
            rows = [{**row, "in_calibration": copied[row["task"]] if row["task"] in samples else None} for row in rows]
            said = f"samples that share {GRAM} words in a row with the training text of the run"
            notes = (*notes, f"in calibration: {said}, in lower case and without punctuation")
    return TaskScores(name, rows, about, notes)


def in_calibration(samples: Mapping[str, Iterable[Mapping[str, Any]]], texts: Iterable[str]) -> Counter[str]:
    """Return how many samples of each task share `GRAM` words in a row with a text, which is given in parts.

    Words are in lower case and without punctuation (Brown et al. 2020, Language models are few-shot learners, appendix
    C). Samples are lm-eval's; each text in their document is looked at by itself.
    """
    wanted: dict[int, set[tuple[str, int]]] = {}
    for task, some in samples.items():
        for one in some:
            for text in _texts(one["doc"]):
                for gram in _grams([text]):
                    wanted.setdefault(gram, set()).add((task, one["doc_id"]))
    found = {one for gram in _grams(texts) for one in wanted.get(gram, ())}
    return Counter(task for task, _ in found)


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(one)


def _grams(texts: Iterable[str]) -> Iterator[int]:
    """Yield a hash of every `GRAM` words in a row of a text, which is given in parts."""
    last = deque[str](maxlen=GRAM)
    for text in texts:
        for word in PUNCTUATION.sub("", text.lower()).split():
            last.append(word)
            if len(last) == GRAM:
                yield hash(tuple(last))


def harness_model(model: nn.Module, tokenizer: Any, batch: int | str, **more: Any) -> Any:
    """Return a model of transformers as lm-eval's `HFLM`; see `prunekit.integrations.lm_eval.harness_model`."""
    inner: Any = unwrapped(model)
    if getattr(inner, "config", None) is None or not hasattr(inner, "tie_weights"):
        raise ModelError(f"lm-eval: expected a language model of transformers, got {type(inner).__name__}")
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None and "prefix_token_id" not in more:
        raise ModelError("lm-eval: expected a tokenizer with a bos_token or an eos_token, which it puts before texts")
    require_tokens(inner, 1 + max(tokenizer.get_vocab().values(), default=-1), "tokenizer")
    library = import_module("lm_eval.models.huggingface")
    return library.HFLM(pretrained=inner, tokenizer=tokenizer, batch_size=batch, **more)


def _task_manager(asked: Asked) -> Any:
    """Return lm-eval's index of tasks: of the folder alone if it has all the names, which spares reading thousands."""
    library, folder = import_module("lm_eval.tasks"), None if asked.folder is None else str(asked.folder)
    if folder is not None:
        own = library.TaskManager(include_path=folder, include_defaults=False)
        if set(asked.names) <= set(own.all_subtasks):
            return own
    return library.TaskManager(include_path=folder)


def known_tasks(names: Iterable[str], manager: Any) -> list[str]:
    """Return the names of tasks, with those that a pattern such as `mmlu_*` stands for; raise if one is unknown."""
    found = {name: manager.match_tasks([name]) for name in names}
    if unknown := next((name for name, some in found.items() if not some), None):
        known = nearest(unknown, manager.all_tasks)
        raise UsageError(f"--tasks: lm-eval {version('lm_eval')} has no task {unknown!r}; {known}")
    return list(dict.fromkeys(name for some in found.values() for name in some))


def _reason(error: Exception) -> str:
    """Return why lm-eval failed, and what to do where it was kept from the network."""
    fetch = "; --download lets it fetch data sets that are not here" if "offline" in str(error).lower() else ""
    return f"{with_type(error)}{fetch}"


def _rows(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each task or group and each metric, whose keys are `metric,filter` in lm-eval's results."""
    first = next(iter(found.values()))
    for task, values in first["results"].items():
        for key in values:
            metric, _, chosen = key.partition(",")
            if chosen and not metric.endswith("_stderr"):
                errors = {name: one["results"][task].get(f"{metric}_stderr,{chosen}") for name, one in found.items()}
                yield {
                    "task": task,
                    "version": first["versions"].get(task),
                    "metric": metric if chosen == "none" else f"{metric} ({chosen})",
                    "higher_is_better": first["higher_is_better"].get(task, {}).get(metric),
                    "few_shot": first["n-shot"].get(task),
                    "samples": first["n-samples"].get(task, {}).get("effective"),
                    "scores": {name: one["results"][task][key] for name, one in found.items()},
                    "errors": {name: None if isinstance(error, str) else error for name, error in errors.items()},
                }


def plain_model(folder: Path, *, allow_code: bool = False) -> nn.Module | None:
    """Return the language model of a folder of transformers, or of a standalone one, whose code runs; None if neither.

    The code of a standalone folder has to be allowed.
    """
    if (folder / CODE).is_file():
        if not allow_code:
            raise UsageError(f"{folder}: its {CODE} is code that would run; if you trust it, add --allow-code")
        return set_mode(Standalone().load(folder), False)
    if not (folder / CONFIG).is_file():
        return None
    found = read_json(folder / CONFIG, "the configuration of a model of transformers", ModelError, finite=False)
    both = isinstance(found, dict) and found.get("is_encoder_decoder")
    settings = ModelSettings(str(folder.absolute()), "hf", head="seq2seq" if both else "causal_lm")
    return set_mode(builder(settings)(), False)


def folder_tokenizer(folders: Iterable[Path | None]) -> Any:
    """Return the tokenizer in the first of several folders that has one; nothing is downloaded and no code runs."""
    library, given = import_module("transformers"), [folder for folder in folders if folder is not None]
    folder = next((one for one in given if (one / TOKENIZER).is_file()), None)
    if folder is None:
        where = " or ".join(map(str, given))
        raise UsageError(f"expected a {TOKENIZER} in {where}, found none: --tokenizer FOLDER, that of the dense model")
    with raised_as(DataError, f"{folder}: expected a tokenizer of transformers: ", reason=with_type):
        return library.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
