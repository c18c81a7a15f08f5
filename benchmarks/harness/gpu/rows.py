"""The bars of `gpu.py`: rows made of all figures in its JSON, whichever command measured them.

A step of ours is compared with the largest of its bounds, at rates of the same file. One is the step without offload,
or its arithmetic at the rate that the largest such step reached. One is the link's time for the gradients and for new
values, or for all values twice where the device does not keep them. The others are the update on the host and the
disk's bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from harness.gpu.record import Figures
from harness.gpu.sections import CAP_BYTES, CAPPED_HOST_BYTES, CAPPED_WEIGHTS_BYTES, CONTEXT_BYTES, MICRO_BATCHES
from harness.rows import Row, missing, row, ungraded

from zero_offload.base.types import GIB

REACH, REACH_MFU, REACH_IDLE, REACH_MEMORY = 1.05, 1 / 0.5, 0.05, 1 / 2
REACH_MUON = 1.15
REACH_FSDP2, REACH_DEEPSPEED = 1 / 1.5, 1 / 2
PUBLISHED_TOKENS_PER_S, PUBLISHED = 14_000, "LLMQ, 7B on an H100, 14,000 tokens/s"

CLIPPED = "backward, then the update, as clipping asks"

Runs = tuple[str, str]
"""A section, and how the names of its figures begin."""


class Bounded(NamedTuple):
    """Steps of ours, how their states rest, and the steps without offload that bound them."""

    ours: Runs
    states: str
    plain: Runs
    is_capped: bool = False
    """True if the device keeps `CAPPED_WEIGHTS_BYTES` of values only, and the rest comes for forward and backward."""
    is_frozen: bool = False
    """True if gradients and updates are too few to count."""


class Pair(NamedTuple):
    """Steps of ours beside others of the same model."""

    name: str
    ours: Runs
    against: str
    theirs: Runs
    reach: float = REACH


BOUNDED = (
    Bounded(("8b", ""), "fp32", ("plain", "8b: ")),
    Bounded(("2b", "cpu: "), "fp32", ("plain", "2b: ")),
    Bounded(("transformers", "ours: "), "fp32", ("transformers", "plain: ")),
    Bounded(("13b-24g", ""), "compact", ("plain", "8b: "), is_capped=True),
    Bounded(("32b-lora", ""), "fp32", ("plain", "8b: "), is_capped=True, is_frozen=True),
    Bounded(("30b-moe-lora", ""), "fp32", ("plain", "8b: "), is_capped=True, is_frozen=True),
    Bounded(("8b-nvme", ""), "compact", ("plain", "8b: ")),
    Bounded(("2b-nvme", ""), "fp32", ("plain", "2b: ")),
)
PAIRS = (
    Pair('8b: tiers "auto"', ("8b-auto", ""), "all in CPU memory", ("8b", ""), 1.0),
    Pair("2b: optimizer on the device", ("2b", "optimizer device: "), "no offload", ("plain", "2b: ")),
    Pair("2b: overlap backward", ("2b", "overlap backward: "), "overlap forward", ("2b", "cpu: ")),
    Pair("2b: zo.Muon, in CPU memory", ("muon", "cpu: "), "no offload", ("muon", "plain: "), REACH_MUON),
    Pair("2b: zo.Muon, on the device", ("muon", "optimizer device: "), "no offload", ("muon", "plain: "), REACH_MUON),
    Pair("2b: in CPU memory", ("2b", "cpu: "), "FSDP2, CPU offload", ("fsdp2", ""), REACH_FSDP2),
    Pair("2b: in CPU memory", ("2b", "cpu: "), "DeepSpeed ZeRO-3, CPU", ("deepspeed", ""), REACH_DEEPSPEED),
    Pair("long: activations in CPU memory", ("long", "cpu: "), "on the device", ("long", "device: ")),
)


class Found:
    def __init__(self, sections: dict[str, dict[str, Any]]) -> None:
        self.sections = sections

    def figures(self, section: str) -> dict[str, Figures]:
        found: dict[str, Figures] = self.sections.get(section, {}).get("figures", {})
        return found

    def figure(self, section: str, name: str) -> Figures:
        """Empty where it was not measured."""
        found = self.figures(section).get(name, {})
        return {} if found.keys() & {"skipped", "error", "out_of_memory"} else found

    def with_key(self, section: str, begins: str, key: str) -> dict[str, Figures]:
        named = self.figures(section).items()
        return {name: figures for name, figures in named if name.startswith(begins) and key in figures}

    def steps(self, runs: Runs) -> dict[int, Figures]:
        """By tokens, ascending."""
        section, prefix = runs
        measured = self.with_key(section, prefix, "tokens").items()
        steps = {each["tokens"]: each for name, each in measured if name == f"{prefix}{each['tokens']} tokens"}
        return dict(sorted(steps.items()))

    def bounds(self, which: Bounded, figures: Figures) -> dict[str, float]:
        """Seconds that such a step takes at least, by what takes them; empty where no rate is known."""
        numel, plain, bounds = figures["numel"], self.steps(which.plain), {}
        same = plain.get(figures["tokens"])
        if same is not None and same["numel"] == numel:
            bounds["no offload"] = same["step_s"]
        elif largest := max((each["flops_per_s"] for each in plain.values()), default=None):
            bounds["arithmetic, as without offload"] = figures["flops"] / largest
        if device := self.figure("rates", "device"):
            up_bytes = 2 * (2 * numel - CAPPED_WEIGHTS_BYTES) if which.is_capped else 2 * numel
            bounds["link up"] = up_bytes / device["upload_bytes_per_s"]
            if not which.is_frozen:
                bounds["link down"] = 2 * numel / device["download_bytes_per_s"]
        update = self.figure("rates", f"update on the host, {which.states}")
        if update and not which.is_frozen:
            bounds["update on the host"] = update["s_per_parameter"] * numel
            # The norm is known when backward ends, and forward hides what it can. Backward computes forward again.
            if "no offload" in bounds:
                bounds[CLIPPED] = 0.75 * bounds["no offload"] + bounds["update on the host"]
        if disk := self.figure(which.ours[0], "disk, bytes/s"):
            read_s = figures["read_bytes"]["nvme"] / disk["read_bytes_per_s"]
            bounds["disk"] = read_s + figures["written_bytes"]["nvme"] / disk["write_bytes_per_s"]
        return bounds


def rows_of(sections: dict[str, dict[str, Any]]) -> list[Row]:
    found = Found(sections)
    makers = (_mistakes, _bounded, _pairs, _of_8b, _accumulation, _memory)
    return [each for maker in makers for each in maker(found)]


def _none_wanted(name: str, count: int) -> Row:
    return row(name, count, "", "one; none is wanted", 1, 0.0)


def _mistakes(found: Found) -> Iterator[Row]:
    for name, section in found.sections.items():
        broken = len(found.with_key(name, "", "error")) + (section["status"] == "killed")
        if broken:
            yield _none_wanted(f"{name}: parts that failed", broken)
        for tests in found.with_key(name, "tests", "failed").values():
            yield _none_wanted(f"{name}: tests that fail", tests["failed"])
    for precision in ("fp32", "bf16"):
        runs = found.with_key("placements", precision, "losses")
        for ending in ("", ", clipped"):
            losses = [each["losses"] for name, each in runs.items() if name.endswith(", clipped") == bool(ending)]
            if losses:
                differ = sum(each != losses[0] for each in losses)
                yield _none_wanted(f"placements: of {len(losses)} runs that differ, {precision}{ending}", differ)
    for name, in_cpu in found.with_key("two-ranks", "", "losses").items():
        if name.endswith(", cpu"):
            on_device = found.figure("two-ranks", name.replace(", cpu", ", device"))
            yield _none_wanted(f"two-ranks: tiers that differ, {name[:7]}", int(in_cpu != on_device))


def _bounded(found: Found) -> Iterator[Row]:
    for which in BOUNDED:
        for tokens, figures in found.steps(which.ours).items():
            if bounds := found.bounds(which, figures):
                clipped = bounds.pop(CLIPPED, None)
                largest = max(bounds, key=bounds.__getitem__)
                name = f"{which.ours[0]}: {figures['numel'] / 1e9:.1f}B, {tokens} tokens"
                yield row(name, figures["step_s"], "s", largest, bounds[largest], REACH)
                if largest != "no offload" and "no offload" in bounds:
                    yield ungraded(name, figures["step_s"], "s", "no offload", bounds["no offload"], REACH)
                if clipped is not None:
                    yield ungraded(name, figures["step_s"], "s", CLIPPED, clipped, REACH)


def _pairs(found: Found) -> Iterator[Row]:
    for pair in PAIRS:
        theirs = found.steps(pair.theirs)
        for tokens, ours in found.steps(pair.ours).items():
            name, ours_s = f"{pair.name}, {tokens} tokens", ours["step_s"]
            if tokens in theirs:
                yield row(name, ours_s, "s", pair.against, theirs[tokens]["step_s"], pair.reach)
            elif pair.theirs[0] in found.sections:
                yield missing(name, ours_s, "s", pair.against, pair.reach)


def _of_8b(found: Found) -> Iterator[Row]:
    steps = found.steps(("8b", ""))
    if not steps:
        return
    tokens, most = max(steps.items())
    name = f"8b: {tokens} tokens"
    if device := found.figure("rates", "device"):
        as_product_s = most["flops"] / device["matmul_flops"]["bfloat16"]
        yield row(f"{name}, 1 / MFU", most["step_s"], "s", "its FLOPs as one product", as_product_s, REACH_MFU)
    yield ungraded(f"{name}, published", most["step_s"], "s", PUBLISHED, tokens / PUBLISHED_TOKENS_PER_S, 1.0)
    for each, figures in found.with_key("8b", "profile", "busy").items():
        yield row(f"8b: {each}, idle", 1 - figures["busy"], "", "the step", 1.0, REACH_IDLE)
    plain = found.steps(("plain", "8b: "))
    if met := [each for each in steps if each in plain and steps[each]["step_s"] <= REACH * plain[each]["step_s"]]:
        others = {
            what: s
            for what, s in found.bounds(BOUNDED[0], steps[min(met)]).items()
            if what not in ("no offload", CLIPPED)
        }
        by_rates = max(others.values(), default=0.0) * min(met) / plain[min(met)]["step_s"]
        what = "8b: tokens a step, the fewest measured at which offloading is free"
        yield ungraded(what, min(met), "", "by rates", max(by_rates, 1.0), REACH)


def _accumulation(found: Found) -> Iterator[Row]:
    for section in ("8b", "2b"):
        runs = found.with_key(section, "", "step_s").items()
        loop, by_unit = ([each for name, each in runs if name.startswith(how)] for how in ("loop", "accumulate"))
        if loop and by_unit:
            name = f"{section}: zo.accumulate, {MICRO_BATCHES} micro-batches"
            yield row(name, by_unit[0]["step_s"], "s", "a loop over them", loop[0]["step_s"], 1.0)


def _memory(found: Found) -> Iterator[Row]:
    device_gib, host_gib = (CAP_BYTES - CONTEXT_BYTES) / GIB, CAPPED_HOST_BYTES / GIB
    for section in ("13b-24g", "32b-lora", "30b-moe-lora"):
        if steps := found.steps((section, "")).values():
            peak, host = (max(each[f"{where}_peak_gib"] for each in steps) for where in ("device", "host"))
            yield row(f"{section}: device memory", peak, "GiB", "24 less 1 GiB", device_gib, 1.0)
            yield row(f"{section}: host memory", host, "GiB", "the limit", host_gib, 1.0)
    kept = found.steps(("long", "device: "))
    for tokens, away in found.steps(("long", "cpu: ")).items():
        if tokens in kept and (theirs := kept[tokens]["device_peak_gib"]):
            yield row("long: device memory", away["device_peak_gib"], "GiB", "on the device", theirs, REACH_MEMORY)
