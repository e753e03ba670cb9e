"""The examples and configs/, as a user runs them: through the real `deepspeed` launcher."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples import demo
from examples.launch import ROOT, JobError, environment, free_port, launch

pytestmark = pytest.mark.launcher

CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.json"))
SMALL = ["--layers", "1", "--width", "64", "--heads", "2", "--context", "32", "--warmup", "2"]


def _run(config: dict[str, Any], script: str, folder: Path, steps: int) -> dict[str, Any]:
    config["tensorboard"]["output_path"] = str(folder)
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    arguments = [script, "--deepspeed_config", str(path), "--steps", str(steps)]
    return launch(arguments + (SMALL if "lm" in script else []), folder / "result.json", quiet=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_runs(name: str, tmp_path: Path) -> None:
    config = json.loads((ROOT / "configs" / f"{name}.json").read_text())
    section = config["compressed_communication"]
    if section["method"] == "sparse_momentum":
        section["sparse_momentum"] = {"freeze_step": 3}
    script = "examples/train_digits.py" if name.startswith("digits") else "examples/train_lm.py"
    result = _run(config, script, tmp_path, steps=6)
    compressed = result["compressed_phase"]
    if section["method"] == "dense":
        # The few bytes by which all ranks agree that a gradient is finite come on top.
        assert result["dense_bytes"] <= result["inter_node_bytes"] <= result["dense_bytes"] + 6 * 4 * 8
        assert compressed["steps"] == 0
    else:
        assert compressed["steps"] == (3 if section["method"] == "sparse_momentum" else 6)
        # Small models hold more excluded parameters than those of the demo, which has 45x and more.
        assert compressed["dense_bytes"] > 20 * compressed["inter_node_bytes"]
    assert list((tmp_path / config["tensorboard"]["job_name"]).glob("events*"))


def test_the_demos_bytes_are_45x_below_dense_at_1_percent() -> None:
    """By formula, for the demo's model: the demo itself takes minutes."""
    from ds_sparse.compressors import Quota, build_compressor
    from ds_sparse.config import parse
    from ds_sparse.costs import dense_bytes
    from ds_sparse.exchange import AllGatherExchange
    from ds_sparse.wire import Wire
    from examples.lm.model import GPT, GPTConfig

    config = parse(json.loads((ROOT / "configs" / "mstopk_zero1.json").read_text())["compressed_communication"])
    sizes = [param.numel() for param in GPT(GPTConfig()).parameters()]
    excluded = sum(numel for numel in sizes if numel < config.exclude.min_numel)
    quota = Quota(build_compressor(config.compressor), config.compressor.density, sum(sizes) - excluded)
    peers: Any = SimpleNamespace(size=2, rank=0)
    wire = Wire(config.exchange.value_dtype, config.exchange.index_encoding)
    sent = AllGatherExchange(peers, wire).cost(quota, excluded).sent
    assert dense_bytes(sum(sizes), peers=2) >= 45 * sent


UNCHANGED_SCRIPT = """
import argparse, json, torch, deepspeed
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--result")
deepspeed.add_config_arguments(parser)
args = parser.parse_args()
torch.distributed.init_process_group("gloo")  # joined already, DeepSpeed compiles nothing
deepspeed.ops.__compatible_ops__ = __import__("collections").defaultdict(bool)
deepspeed.init_distributed()
model = torch.nn.Linear(40, 40)
engine = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())[0]
for _ in range(3):
    engine.backward(engine(torch.randn(4, 40)).square().mean())
    engine.step()
if torch.distributed.get_rank() == 0:
    handle = getattr(engine, "compressed_communication", None)
    json.dump({"exchanges": handle.stats.total.exchanges if handle else 0}, open(args.result, "w"))
torch.distributed.destroy_process_group()
"""


def _unchanged(folder: Path, section: dict[str, Any], module: list[str]) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "compressed_communication": section,
    }
    (folder / "train.py").write_text(UNCHANGED_SCRIPT)
    (folder / "ds_config.json").write_text(json.dumps(config))
    arguments = [*module, str(folder / "train.py"), "--deepspeed", "--deepspeed_config", str(folder / "ds_config.json")]
    return launch(arguments, folder / "result.json", quiet=True)


def test_an_unchanged_script_compresses_through_the_module(tmp_path: Path) -> None:
    section = {"method": "sparse_gradient", "topology": {"ranks_per_node": 2}}
    assert _unchanged(tmp_path, section, ["--module", "ds_sparse.run"])["exchanges"] == 3
    assert _unchanged(tmp_path, section, [])["exchanges"] == 0  # without the module the section means nothing


def test_a_misspelt_section_ends_the_job_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        _unchanged(tmp_path, {"metod": "dense"}, ["--module", "ds_sparse.run"])
    assert caught.value.status != 0
    assert "'compressed_communication.metod' is not a known key. Did you mean 'method'?" in caught.value.output


def _node(index: int, hostfile: Path, port: int, script: list[str]) -> subprocess.Popen[str]:
    command = ["deepspeed", "--hostfile", str(hostfile), "--no_ssh", "--node_rank", str(index)]
    command += ["--master_addr", "127.0.0.1", "--master_port", str(port), *script]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_two_launchers_make_two_nodes_without_a_setting(tmp_path: Path) -> None:
    """What a real cluster of two hosts looks like to the topology: nothing in the section says who is where."""
    config = json.loads((ROOT / "configs" / "digits_sparse_gradient.json").read_text())
    del config["compressed_communication"]["topology"], config["tensorboard"]
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("first slots=2\nsecond slots=2\n")
    port, result = free_port(), tmp_path / "result.json"
    script = ["examples/train_digits.py", "--deepspeed_config", str(tmp_path / "ds_config.json")]
    script += ["--steps", "4", "--result", str(result)]
    nodes = [_node(index, hostfile, port, script) for index in (0, 1)]
    outputs = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    assert "2 nodes x 2 ranks, sparse_gradient" in outputs[0]
    written = json.loads(result.read_text())
    assert 0 < written["inter_node_bytes"] < written["dense_bytes"] / 10


def test_the_demos_table_compares_what_it_says() -> None:
    phase = {"steps": 3, "inter_node_bytes": 3_000_000, "dense_bytes": 150_000_000}
    run = {"steps": 4, "seconds": 1.0, "wall_seconds": 2.0, "dense_bytes": 200_000_000}
    dense = run | {"validation_loss": 2.0, "inter_node_bytes": 200_000_000}
    compressed = run | {"validation_loss": 2.05, "inter_node_bytes": 53_000_000, "compressed_phase": phase}
    table = demo.comparison(dense, compressed)
    assert "2.0500 (+2.50 %)" in table
    assert "50.0x" in table  # of the compressed phase
    assert "3.8x" in table  # of the whole run
