"""The clock of another machine: kits are written for it, measured there by hand or by a command, and read back.

Kits are kept in the user's cache by device, under a name that says what is in them: the same call finds the times of
the same kit, whoever brought them. So a call that needs times which are not there writes the kit, says what to do, and
ends; called again, it goes on.
"""

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from prunekit.backends.session import Inputs, Setting
from prunekit.errors import ArtifactError, NotMeasuredError, RunError, TimesNeededError, UsageError
from prunekit.known_names import DTYPES
from prunekit.measure.device.kit import MANIFEST, SCRIPT, TIMES, Kit, from_device, kit_backend, script_sum
from prunekit.measure.device.times import DeviceTimes, TimedFile, read_kit, read_times
from prunekit.measure.latency.timing import median_interval, paired_ratio
from prunekit.measure.latency_profile.network_timing import LayerTimes, Network
from prunekit.settings.deployment import Target
from prunekit.settings.pruning import facts_of
from prunekit.utils.display import factor, interval
from prunekit.utils.files import StrPath, atomic_file, user_cache
from prunekit.utils.progress import Log, stage
from prunekit.utils.user_code import refuse_forbidden

FEWEST = 10
"""Networks, at least, that a table is fitted to."""
LAST_LINES = 12
"""Lines of what a command printed that its error shows."""


@dataclass(frozen=True)
class Timing:
    """The time of a model on the target, measured beside the dense one in new processes."""

    # ms, ms_low, ms_high: of a forward pass of the batch: the median over processes of their medians, and an interval
    # that holds the 95 % intervals of all
    ms: float
    ms_low: float
    ms_high: float
    # speedup, speedup_low, speedup_high: median and interval, as for ms, of the ratios to the dense model, pair by pair
    speedup: float
    speedup_low: float
    speedup_high: float
    stable: bool  # whether the figures support a claim
    doubts: tuple[str, ...]  # why the figures are not stable
    notes: tuple[str, ...] = ()  # why it was not measured in processes of its own, if so
    processes: int = 1  # the number of processes that measured it

    def excess(self, asked: dict[str, float]) -> float:
        """Return the time over the time asked for, the largest of all budgets of time."""
        return max(facts_of(name).excess(value, self.ms, self.speedup) for name, value in asked.items())

    def __str__(self) -> str:
        return (
            f"{self.ms:.3g} ms [{self.ms_low:.3g}, {self.ms_high:.3g}], {factor(self.speedup)} "
            f"{interval(self.speedup_low, self.speedup_high)}{'' if self.stable else ', unstable'}"
        )


@dataclass(frozen=True)
class DeviceClock:
    """The clock of a target that is another machine."""

    target: Target
    log: Log = stage

    def times(
        self, kit: Kit, *, what: str = "networks of its widths", measure: bool = True, again: bool = False
    ) -> DeviceTimes:
        """Return what the device measured with a kit; one that it knows is not measured again, unless `again`.

        Raises:
            TimesNeededError: the kit is written, and somebody has to measure it.
            NotMeasuredError: it was not measured, and `measure` is False.
            RunError: the command failed, or left no times.
        """
        folder = self._folder(kit)
        if not measure and not (folder / TIMES).exists():
            raise NotMeasuredError(f"{self.target.device} has not timed {what} yet: `prunekit profile RECIPE`")
        manifest = read_kit(self.written(kit))
        if self.target.command:
            found = (None if again else _whole(folder / TIMES, manifest)) or self._run(folder, manifest)
        elif not (folder / TIMES).exists():
            raise TimesNeededError(_to_do(self.target.device, what, folder, manifest))
        elif again:
            raise UsageError(
                f"{self.target.device}: to measure {what} again, run there: python3 {folder.name}/{SCRIPT} --again; "
                f"copy its {TIMES} into {folder}, and ask without measuring again"
            )
        else:
            found = read_times(folder / TIMES, manifest)
        for name, reason in found.failed.items():
            self.log(f"{self.target.device}: {name} was not measured: {from_device(reason)}")
        said = "".join(f"; {from_device(doubt)}" for doubt in found.doubts)
        self.log(f"{self.target.device} ({found.described}): {len(found.networks)} networks were measured{said}")
        return found

    def layer_times(self, kit: Kit, found: DeviceTimes) -> list[LayerTimes | None]:
        """Return what the device measured of each network in a kit, by layer where it did for all; None: it failed."""
        files, timed = self._folder(kit) / "files", [found.networks.get(name) for name in kit.names]
        layered = all(one.layers_us for one in found.networks.values())
        packed = [files / f"{name}.onnx.gz" for name in kit.names]
        return [
            None if one is None else one.layer_times(file if layered and file.exists() else None)
            for one, file in zip(timed, packed, strict=True)
        ]

    def written(self, kit: Kit) -> Path:
        """Return the folder in which a kit is kept, which is written if it is not there."""
        folder = self._folder(kit)
        manifest = read_kit(folder) if (folder / MANIFEST).exists() else {}
        stale = manifest.get("script") != script_sum() and not (folder / TIMES).exists()
        if manifest.get("kit") != kit.key or stale:
            kit.write(folder, self.log)
        return folder

    def knows(self, kit: Kit) -> bool:
        """Return whether the device has measured a kit."""
        return (self._folder(kit) / TIMES).exists()

    def _folder(self, kit: Kit) -> Path:
        return devices_folder() / self.target.device / kit.folder_name

    def timings(self, dense: nn.Module, models: Sequence[nn.Module], inputs: Inputs, what: str) -> list[Timing | None]:
        """Return the times of models beside the dense one, with intervals; None of one that failed there."""
        named = [Network(f"{what} {number}", one, partial(_itself, one)) for number, one in enumerate((dense, *models))]
        kit = Kit(type(dense).__name__, named, inputs, device_setting(self.target))
        found = self.times(kit, what=what).networks
        return [_timing(found[name]) if name in found else None for name in kit.names[1:]]

    def _run(self, folder: Path, manifest: Mapping[str, Any]) -> DeviceTimes:
        """Run the user's command, which takes the kit to the device, and return the times it brings; bad ones go."""
        (folder / TIMES).unlink(missing_ok=True)
        given = self.target.command or ""
        refuse_forbidden(given, UsageError)
        command = given.replace("{kit}", shlex.quote(str(folder)))
        self.log(f"{self.target.device}: {command}")
        with subprocess.Popen(
            command,
            shell=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                printed, _ = process.communicate(timeout=self.target.limit_s)
                ended = f"it ended with exit code {process.returncode}" if process.returncode else ""
            except subprocess.TimeoutExpired:
                _end(process)
                printed, ended = (
                    process.communicate()[0],
                    f"it took more than target.limit_s, {self.target.limit_s:g} s",
                )
            except BaseException:
                _end(process)
                raise
        if not ended and not (folder / TIMES).exists():
            ended = f"it left no {TIMES} in {folder}"
        if not ended:
            try:
                return read_times(folder / TIMES, manifest)
            except (ArtifactError, RunError) as error:
                ended = f"what it brought cannot be used: {error}"
        (folder / TIMES).unlink(missing_ok=True)
        last = "\n".join(f"  {line}" for line in printed.splitlines()[-LAST_LINES:])
        raise RunError(
            f"target.command: {ended}; the kit {folder} stays, and the same call goes on from it. Its last lines:\n"
            f"{last or '  (it printed nothing)'}"
        )


def _end(process: subprocess.Popen[str]) -> None:
    """End a command with all that it has started."""
    with suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def _whole(path: Path, manifest: Mapping[str, Any]) -> DeviceTimes | None:
    """Return the times of a kit; None where they are not there, or cannot be used."""
    try:
        return read_times(path, manifest)
    except (ArtifactError, RunError):
        return None


def device_setting(target: Target) -> Setting:
    """Return the setting in which another machine times networks; raise if its runtime runs no files."""
    setting = Setting(
        target.runtime, target.device, target.batch, target.threads, DTYPES[target.dtype], target.memory_format
    )
    kit_backend(setting)
    return setting


def _itself(model: nn.Module) -> nn.Module:
    return model


def _timing(found: TimedFile) -> Timing:
    """Return the time of a network beside the dense one."""
    own, dense = found.array
    doubts = tuple(found.doubts)
    return Timing(*median_interval(own), *paired_ratio(dense, own), stable=not doubts, doubts=doubts)


def _to_do(device: str, what: str, folder: Path, manifest: Mapping[str, Any]) -> str:
    """Return what somebody has to do before a call can go on, and what the device has timed of the same model."""
    facts = ("runtime", "batch", "threads", "dtype")
    known = {
        ", ".join(f"{key} {one.get(key)}" for key in facts)
        for place, one in stored_kits(device)
        if one["model"] == manifest["model"] and (place / TIMES).exists()
    }
    other = known - {", ".join(f"{key} {manifest.get(key)}" for key in facts)}
    has = f" (of {manifest['model']} it knows {'; '.join(sorted(other))})" if other else ""
    return (
        f"{device!r} is no device of this machine, and has not timed {what} yet{has}. The kit for it is in {folder}:\n"
        f"  1. copy that folder to {device}, for example: scp -r {shlex.quote(str(folder))} {device}:\n"
        f"  2. there: python3 {folder.name}/{SCRIPT}\n"
        f"  3. copy its {TIMES} back into {folder}, or give it to `prunekit profile RECIPE --times {TIMES}`\n"
        "  4. run the same again, on the same data, which goes on from there\n"
        "Or name a command that does it all, target.command, such as\n"
        f"  ssh {device} rm -rf k && scp -r {{kit}} {device}:k && ssh {device} python3 k/{SCRIPT} && "
        f"scp {device}:k/{TIMES} {{kit}}"
    )


def devices_folder() -> Path:
    """Return the folder in which the kits of all devices are kept."""
    return user_cache("devices")


def stored_kits(device: str = "*") -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the folders of kits, and what their manifests say; those that are damaged are left out."""
    for path in sorted(devices_folder().glob(f"{device}/*/{MANIFEST}")):
        try:
            yield path.parent, read_kit(path.parent)
        except ArtifactError:
            continue


def measured_numbers(target: Target) -> list[int]:
    """Return the numbers of networks of the kits that a device has measured, the largest first; not of candidates."""
    kits = [one for place, one in stored_kits(target.device) if (place / TIMES).exists()]
    return sorted({len(one["networks"]) for one in kits if len(one["networks"]) >= FEWEST}, reverse=True)


def accept_times(file: StrPath, device: str) -> Path:
    """Copy a `times.json` to the kit of a device that it is of, and return that kit's folder.

    Raises:
        UsageError: no kit that is kept for the device is the one that was measured.
        ArtifactError: the file is damaged, or was changed.
    """
    path, errors = Path(file), list[ArtifactError]()
    for folder, manifest in stored_kits(device):
        try:
            read_times(path, manifest)
        except ArtifactError as error:
            errors.append(error)
            continue
        if path.resolve() != (folder / TIMES).resolve():
            with atomic_file(folder / TIMES) as temporary:
                shutil.copyfile(path, temporary)
        return folder
    if errors:
        raise errors[-1]
    raise UsageError(f"{path}: no kit was written for {device!r} yet; `prunekit kit RECIPE` writes one")


def device_rows() -> Iterator[dict[str, Any]]:
    """Yield a row for each kit that is kept, with what it was measured on."""
    for folder, manifest in stored_kits():
        row = {"name": folder.parent.name, "model": manifest["model"], "runtime": manifest["runtime"]}
        row |= {"networks": len(manifest["networks"]), "kit": str(folder)}
        try:
            row["measured"] = read_times(folder / TIMES, manifest).described
        except (ArtifactError, RunError) as error:
            row["measured"] = f"no: {error}" if (folder / TIMES).exists() else "not yet"
        yield row
