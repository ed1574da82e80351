"""The instance table: what is in it, and how it is refused."""

from __future__ import annotations

import pytest

from pctool.errors import UsageError
from pctool.facts.instances import instance, instances, parse_table

ROW = '["x.large"]\narch = "x86_64"\nvcpus = 4\ncores = 2\nmemory_mib = 8192\nnetwork_cards = 1\nefa = 0\n'


def test_p5_is_as_ec2_describes_it() -> None:
    p5 = instance("p5.48xlarge")
    assert (p5.vcpus, p5.cores, p5.memory_mib) == (192, 96, 2097152)
    assert (p5.gpu, p5.gpus, p5.gpu_memory_mib) == ("h100", 8, 81920)
    assert (p5.network_cards, p5.efa, p5.arch) == (32, 32, "x86_64")


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("p4d.24xlarge", "a100"),
        ("p5en.48xlarge", "h200"),
        ("p6-b200.48xlarge", "b200"),
        ("p6-b300.48xlarge", "b300"),
        ("g5.xlarge", "a10g"),
        ("g6.xlarge", "l4"),
        ("g6e.xlarge", "l40s"),
        ("trn1.32xlarge", None),
        ("c5n.18xlarge", None),
    ],
)
def test_gpus_are_named_as_gres_names_them(name: str, gpu: str | None) -> None:
    assert instance(name).gpu == gpu


def test_every_row_is_sound() -> None:
    assert len(instances()) == 62
    for row in instances().values():
        assert 0 < row.cores <= row.vcpus
        assert row.efa <= row.network_cards
        assert (row.gpu is None) == (row.gpus == 0) == (row.gpu_memory_mib == 0)


def test_an_unknown_type_comes_with_the_nearest_one() -> None:
    with pytest.raises(UsageError) as caught:
        instance("p5.48xlarg", where="c.yaml:7")
    assert str(caught.value) == "c.yaml:7: instance type 'p5.48xlarg' is not known\n  -> did you mean p5.48xlarge?"


@pytest.mark.parametrize("line", ["vcpu = 4", 'vcpus = "4"', "vcpus = true"])
def test_a_bad_row_is_refused_by_name(line: str) -> None:
    with pytest.raises(ValueError, match=r"x\.large"):
        parse_table(ROW.replace("vcpus = 4", line))


def test_a_missing_key_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x\.large.*cores"):
        parse_table(ROW.replace("cores = 2\n", ""))
