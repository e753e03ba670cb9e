"""The section of ds_config.json: what parses, what is refused, and in which words."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from ds_sparse import ConfigError
from ds_sparse.config import CommunicationConfig, parse, reference_table

DOCS = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
SEE_DOCS = " See docs/configuration.md."

# The section as users are shown it. Keys may be added to the contract; these stay.
SAMPLE = """{
  "enabled": true,
  "method": "sparse_momentum",
  "compressor": {"type": "mstopk", "density": 0.01},
  "error_feedback": {"enabled": true, "decay": 1.0, "momentum": 0.0},
  "exchange": {"type": "cheapest", "value_dtype": "fp32", "index_encoding": "smallest"},
  "topology": {"ranks_per_node": 8},
  "schedule": {"dense_steps": 0, "densities": [], "steps_per_density": 0},
  "exclude": {"min_numel": 1024, "patterns": []},
  "sharded_update": true,
  "fallback": "dense",
  "monitor": {"enabled": true, "interval": 1}
}"""


def leaves(model: type[BaseModel] = CommunicationConfig, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every setting that is no block: its dotted key and its pydantic field."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, (*path, name))
        else:
            yield ".".join((*path, name)), field


def nested(key: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b"."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def message(section: Any) -> str:
    with pytest.raises(ConfigError) as error:
        parse(section)
    return str(error.value)


LEAVES = dict(leaves())


# ---- what parses ------------------------------------------------------------------------------------------------


def test_the_sample_section_is_the_defaults_but_for_what_depends_on_the_cluster() -> None:
    sample = json.loads(SAMPLE)
    parsed = parse(sample)
    assert (parsed.topology.ranks_per_node, parsed.sharded_update) == (8, True)
    del sample["topology"], sample["sharded_update"]
    assert parse(sample) == parse({})


def test_every_key_of_the_sample_reaches_its_field() -> None:
    parsed = parse(json.loads(SAMPLE)).model_dump(mode="json")
    for key, value in json.loads(SAMPLE).items():
        assert parsed[key] == (parsed[key] | value if isinstance(value, dict) else value), key


def test_parsing_leaves_the_users_dictionary_alone() -> None:
    section = {"schedule": {"densities": [0.5, 0.25], "steps_per_density": 2}}
    before = copy.deepcopy(section)
    parse(section)
    assert section == before


@pytest.mark.parametrize("value, number", [(1, 1.0), (0.5, 0.5), (1e-6, 1e-6)])
def test_a_whole_number_is_a_number(value: float, number: float) -> None:
    density = parse({"compressor": {"density": value}}).compressor.density
    assert density == number and type(density) is float


def test_null_is_as_good_as_leaving_an_optional_key_out() -> None:
    section = {"sharded_update": None, "topology": {"ranks_per_node": None}, "compressor": {"samplings": None}}
    assert parse(section) == parse({})


def test_nothing_changes_after_parsing() -> None:
    config = parse({})
    blocks = [config, config.exchange.link, *(block for _, block in config if isinstance(block, BaseModel))]
    assert len(blocks) == 11
    for block in blocks:
        name = next(iter(type(block).model_fields))
        with pytest.raises(ValidationError, match="frozen"):
            setattr(block, name, getattr(block, name))


# ---- what is refused, in which words ----------------------------------------------------------------------------

WRONG: list[tuple[str, Any, str]] = [  # key, value, what is allowed
    # wrong type; values are never coerced
    ("enabled", 1, "true or false"),
    ("enabled", "true", "true or false"),
    ("sharded_update", 0, "true or false, or leave it out"),
    ("compressor", "mstopk", "an object"),
    ("compressor", [], "an object"),
    ("compressor", None, "an object"),
    ("compressor.density", "0.1", "a number in (0, 1]"),
    ("compressor.density", True, "a number in (0, 1]"),
    ("compressor.density", None, "a number in (0, 1]"),
    ("compressor.seed", 2.0, "a whole number in [0, 2147483648)"),
    ("compressor.samplings", "x", "a whole number in [1, 100], or leave it out"),
    ("topology.ranks_per_node", "2", "a whole number in [1, inf), or leave it out"),
    ("topology.ranks_per_node", True, "a whole number in [1, inf), or leave it out"),
    ("schedule.densities", 0.1, "a list, each a number in (0, 1]"),
    ("schedule.densities", "0.1", "a list, each a number in (0, 1]"),
    ("exclude.patterns", "norm", "a list, each a regular expression"),
    # out of range
    ("compressor.density", 0, "a number in (0, 1]"),
    ("compressor.density", 2, "a number in (0, 1]"),
    ("compressor.density", -0.5, "a number in (0, 1]"),
    ("compressor.density", float("nan"), "a finite number"),  # JSON as Python reads it knows NaN and Infinity
    ("compressor.density", float("inf"), "a finite number"),
    ("compressor.samplings", 0, "a whole number in [1, 100], or leave it out"),
    ("error_feedback.decay", 0.0, "a number in (0, 1]"),
    ("error_feedback.momentum", 1.0, "a number in [0, 1)"),
    ("sparse_momentum.stability", 1, "a number in (0, 1)"),
    ("sparse_momentum.freeze_step", 0, "a whole number in [1, inf), or leave it out"),
    ("monitor.interval", 0, "a whole number in [1, inf)"),
    ("watch.interval", -1, "a whole number in [0, inf)"),
    ("topology.timeout_seconds", 0.5, "a number in [1, 10000000], or leave it out"),
    ("exclude.min_numel", -1, "a whole number in [0, inf)"),
    # not one of the words
    ("method", "adam", "one of 'dense', 'sparse_gradient', 'sparse_momentum'"),
    ("fallback", "on", "one of 'dense', 'off', 'error'"),
    ("compressor.type", 3, "one of 'mstopk', 'topk', 'chunked_topk', 'randomk', 'identity'"),
    ("compressor.type", ["topk"], "one of 'mstopk', 'topk', 'chunked_topk', 'randomk', 'identity'"),
    ("exchange.type", "ring", "one of 'cheapest', 'all_gather', 'reduce_scatter', 'dense'"),
    ("exchange.value_dtype", "fp8", "one of 'fp32', 'bf16', 'fp16', 'int8', 'int4', 'int2'"),
    ("exchange.index_encoding", "golomb", "one of 'smallest', 'int32', 'elias_fano', 'bitmap', 'chunk12'"),
    ("exchange.chunks", 0, "a whole number in [1, 64]"),
    ("exchange.chunks", 65, "a whole number in [1, 64]"),
    ("exchange.chunks", 2.0, "a whole number in [1, 64]"),
    ("exchange.link", 10, "an object"),
    ("exchange.link.gbit_per_second", 0, "a number in (0, inf)"),
    ("exchange.link.gbit_per_second", float("inf"), "a finite number"),
    ("exchange.link.latency_us", -1, "a number in [0, inf)"),
    ("exchange.link.latency_us", "1ms", "a number in [0, inf)"),
]


@pytest.mark.parametrize("key, value, allowed", WRONG, ids=[f"{key}={value!r}" for key, value, _ in WRONG])
def test_a_wrong_value_is_named_with_its_key_and_what_is_allowed(key: str, value: Any, allowed: str) -> None:
    said = message(nested(key, value))
    assert said.startswith(f"'compressed_communication.{key}' is {json.dumps(value)}; allowed is {allowed}.")
    assert said.endswith(SEE_DOCS)


NESTED: Any = []
for _ in range(5000):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "section, said",
    [
        ({"method": NESTED}, r"\.method' is \[\[.*; allowed is one of"),
        ({"compressor": {"x" * 5000: 1}}, r"\.compressor\.x+\.\.\.' is not a known key"),
        ({"compressor": {3: 1}}, r"\.compressor' has 3, which is not a known key"),
        ({"\ud800": 1}, r"' has '\\ud800', which is not a known key"),
        ({"compressor": {"density": "1" * 5000}}, r'\.density\' is "1{199}\.\.\.; allowed is'),
        ({"topology": {"timeout_seconds": 10**400}}, r"' is 10{199}\.\.\.; allowed is a finite number"),
        ({"exclude": {"patterns": ["a{99999999999999999999}"]}}, "allowed is a valid regular expression .*too large"),
        ({"exclude": {"patterns": ["(" * 2000 + ")" * 2000]}}, "allowed is a valid regular expression .*recursion"),
    ],
    ids=["nested", "long key", "number key", "half a character", "long value", "long number", "repeats", "parentheses"],
)
def test_what_no_section_can_hold_is_refused_in_a_readable_line(section: Any, said: str) -> None:
    refusal = message(section)
    assert re.search(said, refusal), refusal
    assert refusal.startswith("'compressed_communication") and len(refusal) < 800


@pytest.mark.parametrize("section", [None, [], "auto", True, "mstopk"])
def test_a_section_that_is_no_object_is_refused(section: Any) -> None:
    said = message(section)
    assert said.startswith(f"'compressed_communication' is {section!r}; it must be an object")


@pytest.mark.parametrize(
    "key, value, suggested",
    [
        ("method", "sparse_momentun", "sparse_momentum"),
        ("method", "sparse-gradient", "sparse_gradient"),
        ("compressor.type", "top_k", "topk"),
        ("exchange.type", "allgather", "all_gather"),
        ("exchange.type", "reduce-scatter", "reduce_scatter"),
        ("exchange.index_encoding", "bit_map", "bitmap"),
        ("exchange.index_encoding", "chunk_12", "chunk12"),
        ("compressor.type", "chunk_topk", "chunked_topk"),
    ],
)
def test_a_misspelt_word_brings_the_nearest_one(key: str, value: str, suggested: str) -> None:
    assert f" Did you mean '{suggested}'?" in message(nested(key, value))


@pytest.mark.parametrize(
    "key, suggested",
    [
        ("compresor", "compressor"),
        ("compressor.densitty", "density"),
        ("error_feedback.momentun", "momentum"),
        ("sparse_momentum.freeze_steps", "freeze_step"),
        ("schedule.dense-steps", "dense_steps"),
        ("sparse-momentum", "sparse_momentum"),
        ("exchange.chunk", "chunks"),
        ("exchange.link.latency", "latency_us"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_one_and_all_known_ones(key: str, suggested: str) -> None:
    said = message(nested(key, 1))
    assert said.startswith(f"'compressed_communication.{key}' is not a known key. Did you mean '{suggested}'?")
    block: Any = CommunicationConfig
    for part in key.split(".")[:-1]:
        block = block.model_fields[part].annotation
    assert f"Known keys here: {', '.join(sorted(block.model_fields))}." in said


@pytest.mark.parametrize("key", ["learning_rate", "int", "str", "x[0]", "compressor.bool", "a-b"])
def test_a_key_like_no_other_is_refused_without_a_guess(key: str) -> None:
    said = message(nested(key, 1))
    assert said.startswith(f"'compressed_communication.{key}' is not a known key. Known keys here:")


@pytest.mark.parametrize(
    "key, value, place, allowed",
    [
        ("schedule.densities", [0.5, 2], "schedule.densities.1' is 2;", "a number in (0, 1]"),
        ("schedule.densities", ["0.5"], 'schedule.densities.0\' is "0.5";', "a number in (0, 1]"),
        ("exclude.patterns", ["a", 3], "exclude.patterns.1' is 3;", "a regular expression"),
        ("exclude.patterns", ["("], 'exclude.patterns.0\' is "(";', "a valid regular expression"),
    ],
)
def test_a_wrong_element_of_a_list_is_named_by_its_place(key: str, value: Any, place: str, allowed: str) -> None:
    said = message(nested(key, value))
    assert said.startswith(f"'compressed_communication.{place}") and allowed in said


@pytest.mark.parametrize("key", [*LEAVES, "compressor", "schedule.densities", "exclude.patterns"])
def test_auto_is_refused_with_the_reason_wherever_it_stands(key: str) -> None:
    said = message(nested(key, "auto"))
    assert said.startswith(f"'compressed_communication.{key}' is 'auto'")
    assert "Hugging Face Trainer and Accelerate" in said and "Leave the key out" in said


@pytest.mark.parametrize("key", ["schedule.densities", "exclude.patterns"])
def test_auto_is_refused_inside_a_list(key: str) -> None:
    assert message(nested(key, [0.5, "auto"])).startswith(f"'compressed_communication.{key}.1' is 'auto'")


# ---- combinations -----------------------------------------------------------------------------------------------

GRADIENT = {"method": "sparse_gradient"}
GATHER = {"type": "all_gather"}
CHUNKED = {"compressor": {"type": "chunked_topk"}}
# the key named, its value; the section refused; what of it makes the section allowed
COMBINATIONS: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    (
        "compressor.samplings", 30,
        {"compressor": {"type": "topk", "samplings": 30}}, {"compressor": {"type": "mstopk", "samplings": 30}},
    ),
    *(
        (
            "exchange.type", name, {"compressor": {"type": "identity"}, "exchange": {"type": name}},
            {"exchange": {"type": "dense"}},
        )
        for name in ("all_gather", "reduce_scatter")
    ),
    ("exchange.index_encoding", "chunk12", {"exchange": GATHER | {"index_encoding": "chunk12"}}, CHUNKED),
    *(
        (
            "exchange.index_encoding", "chunk12", CHUNKED | {"exchange": {"type": name, "index_encoding": "chunk12"}},
            {"exchange": GATHER | {"index_encoding": "chunk12"}},
        )
        for name in ("cheapest", "reduce_scatter", "dense")
    ),
    *(
        (
            "exchange.value_dtype", dtype, {"exchange": {"type": "dense", "value_dtype": dtype}},
            {"exchange": GATHER | {"value_dtype": dtype}},
        )
        for dtype in ("bf16", "fp16", "int8", "int4", "int2")
    ),
    *(
        ("exchange.chunks", 2, {"exchange": {"type": name, "chunks": 2}}, {"exchange": GATHER | {"chunks": 2}})
        for name in ("reduce_scatter", "dense")
    ),
    ("error_feedback.momentum", 0.9, {"error_feedback": {"momentum": 0.9}}, GRADIENT),
    (
        "error_feedback.momentum", 0.9,
        GRADIENT | {"error_feedback": {"enabled": False, "momentum": 0.9}}, {"error_feedback": {"momentum": 0.9}},
    ),
    (
        "schedule.densities", [0.1, 0.5],
        {"schedule": {"densities": [0.1, 0.5], "steps_per_density": 1}},
        {"schedule": {"densities": [0.5, 0.1], "steps_per_density": 1}},
    ),
    (
        "schedule.densities", [0.5, 0.1],  # falls, but ends below the final density
        {"schedule": {"densities": [0.5, 0.1], "steps_per_density": 1}, "compressor": {"density": 0.2}},
        {"compressor": {"density": 0.1}},
    ),
    (
        "schedule.densities", [0.5],
        {"schedule": {"densities": [0.5], "steps_per_density": 1}, "compressor": {"type": "identity"}},
        {"schedule": {}},
    ),
    ("schedule.steps_per_density", 0, {"schedule": {"densities": [0.5]}}, {"schedule": {}}),
    ("schedule.steps_per_density", 3, {"schedule": {"steps_per_density": 3}}, {"schedule": {}}),
    ("schedule.dense_steps", 5, {"schedule": {"dense_steps": 5}}, GRADIENT),
    (
        "sparse_momentum", {"freeze_step": 3},
        GRADIENT | {"sparse_momentum": {"freeze_step": 3}}, {"method": "sparse_momentum"},
    ),
]  # fmt: skip


@pytest.mark.parametrize("key, value, section, remedy", COMBINATIONS, ids=[f"{c[0]}={c[1]}" for c in COMBINATIONS])
def test_settings_that_contradict_each_other_are_refused_and_the_remedy_works(
    key: str, value: Any, section: dict[str, Any], remedy: dict[str, Any]
) -> None:
    said = message(section)
    assert said.startswith(f"'compressed_communication.{key}' is {json.dumps(value)}; allowed is ")
    assert re.search(r"\. What to do: \w+", said) and said.endswith(SEE_DOCS)
    parse(section | remedy)


REFUSALS = {  # what is allowed and what to do, of combinations within `exchange`
    "identity": (
        {"compressor": {"type": "identity"}, "exchange": {"type": "reduce_scatter"}},
        "'dense' or 'cheapest' with compressor.type 'identity', which has no indices. What to do: leave exchange.type",
    ),
    "chunk12": (
        {"exchange": {"index_encoding": "chunk12"}},
        "with compressor.type 'chunked_topk' and exchange.type 'all_gather' only, where every 4096 entries send as "
        "many. What to do: leave index_encoding out",
    ),
    "value_dtype": (
        {"exchange": {"type": "dense", "value_dtype": "int8"}},
        "'fp32' with exchange.type 'dense', which sends sums. What to do: leave one of the two out",
    ),
    "chunks": (
        {"exchange": {"type": "reduce_scatter", "chunks": 4}},
        "1 with exchange.type 'reduce_scatter'. What to do: set exchange.type to 'all_gather', or leave chunks out",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_says_what_is_allowed_and_what_to_do(name: str) -> None:
    section, said = REFUSALS[name]
    assert f"; allowed is {said}" in message(section)


@pytest.mark.parametrize("section", [{}, {"type": "cheapest"}, {"type": "cheapest", "chunks": 4}, GATHER])
def test_identity_goes_with_every_exchange_that_may_be_dense(section: dict[str, Any]) -> None:
    """The control of the refusals: the other settings of `exchange` are free."""
    identity = {"compressor": {"type": "identity"}}
    parse({"exchange": section} | (identity if section != GATHER else {}))
    parse({"exchange": section | {"value_dtype": "int8", "link": {"gbit_per_second": 100, "latency_us": 0}}})


# ---- the reference ----------------------------------------------------------------------------------------------


def rows() -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in reference_table().splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells[1:] for cells in lines}


def test_the_reference_on_disk_is_current() -> None:
    assert DOCS.read_text() == reference_table(), "run `make docs`"


def test_every_setting_is_in_the_reference_with_its_default_and_meaning() -> None:
    assert rows().keys() == LEAVES.keys()
    for key, (_, default, meaning) in rows().items():
        value = LEAVES[key].default
        written = value if isinstance(value, str) else json.dumps(value)
        assert default == ("left out" if value is None else f"`{written}`"), key
        assert len(meaning) > 20, key


@pytest.mark.parametrize("key", [key for key, (allowed, *_) in rows().items() if " in " in allowed])
def test_the_bounds_in_the_reference_are_those_that_are_checked(key: str) -> None:
    found = re.search(r" in ([\[(])(\S+), (\S+)([\])])", rows()[key][0])
    assert found is not None
    wrap = (lambda value: [value]) if rows()[key][0].startswith("a list") else (lambda value: value)
    whole = "whole" in rows()[key][0]
    for bound, allowed in ((found[2], found[1] == "["), (found[3], found[4] == "]")):
        if bound == "inf":
            continue
        value = int(bound) if whole else float(bound)
        if allowed:
            CommunicationConfig.model_validate(nested(key, wrap(value)))
        else:
            assert "allowed is" in message(nested(key, wrap(value)))


@pytest.mark.parametrize("key", [key for key, (allowed, *_) in rows().items() if allowed.startswith("one of")])
def test_every_word_in_the_reference_is_known(key: str) -> None:
    for word in re.findall(r"`(\w+)`", rows()[key][0]):
        CommunicationConfig.model_validate(nested(key, word))
