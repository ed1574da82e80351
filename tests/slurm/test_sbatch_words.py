"""The reader of directives against the real sbatch: the words it finds, and whether and how it refuses them.

PCTOOL_FUZZ sets how many scripts (400). Values are drawn so that sbatch takes each of them, since the reader does not
judge values. `sbatch -vvv` prints every word it finds and then fails to reach a controller, which is expected.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pctool.script.read import read_directives

pytestmark = pytest.mark.slurm

SCRIPTS = int(os.environ.get("PCTOOL_FUZZ", "400"))
ROOT = os.environ.get("PCTOOL_SBATCH_ROOT")  # another Slurm's root folder, for a run as root: sbatch is called in it
CONF = """AuthType=auth/none
ClusterName=none
SlurmctldHost=localhost
SlurmctldPort=1
GresTypes=gpu
NodeName=n1 CPUs=1
PartitionName=a Nodes=n1 Default=YES
MessageTimeout=1
"""  # with Slurm's own ten seconds sbatch asks for the controller for as long

_FOUND = re.compile(rb'^sbatch: debug2: Found in script, argument "(.*)"$')
_REFUSED = re.compile(rb"^(?:sbatch: )?((?:error|fatal): .*|option .*|unrecognized option .*|invalid option .*)$")
_NOISE = re.compile(rb"Batch job submission failed|slurm stream socket|Change from #SLURM|fetch_config")


@dataclass(frozen=True)
class Answer:
    """What sbatch said: the words it found, and its complaints."""

    words: list[str]
    complaints: list[str]


class Sbatch:
    """The real sbatch, with a configuration that names no cluster."""

    def __init__(self, folder: Path) -> None:
        self._prefix = ["chroot", ROOT] if ROOT else []
        self._folder = Path(ROOT) / "tmp" if ROOT else folder
        (self._folder / "slurm.conf").write_text(CONF)
        self._seen = "/tmp" if ROOT else str(folder)
        version = subprocess.run(
            [*self._prefix, "sbatch", "--version"], env=self._env(), capture_output=True, text=True, check=True
        )
        major, minor = version.stdout.split()[1].split(".")[:2]
        self.version = (int(major), int(minor))

    def _env(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "SLURM_CONF": f"{self._seen}/slurm.conf", "LC_ALL": "C"}

    def read(self, script: bytes) -> Answer:
        """Return what sbatch says of a script."""
        (self._folder / "c.sh").write_bytes(script)
        argv = [*self._prefix, "sbatch", "-vvv", f"{self._seen}/c.sh"]
        done = subprocess.run(argv, env=self._env(), capture_output=True, timeout=60, check=False)
        lines = done.stderr.split(b"\n")
        words = [match[1].decode("utf-8", "surrogateescape") for line in lines if (match := _FOUND.match(line))]
        said = [match[1] for line in lines if (match := _REFUSED.match(line)) and not _NOISE.search(line)]
        texts = [line.replace(b"fatal: c.sh: ", b"fatal: ").decode("utf-8", "surrogateescape") for line in said]
        return Answer(words, texts)


@pytest.fixture(scope="module")
def sbatch(tmp_path_factory: pytest.TempPathFactory) -> Sbatch:
    return Sbatch(tmp_path_factory.mktemp("sbatch"))


# ---- scripts ----

# Options that take any text, or none: whatever is glued to them, sbatch has nothing to say of their values.
TEXT = [
    "-Jname", "--job-name=x", "--job-name x", "--job-n=y", "--comment='a b'", '--comment="a b"c', "-H", "-HO",
    "--requeue", "--no-requeue", "--hold", "-O", "-p part", "--partition=a,b", "--part=q", "-o out-%j.txt", "-e e.txt",
    "--output=$HOME/x", "-A acc", "--parsable", "-Q", "-v", "-vv", "--wckey=w", "-C f", "-W",
]  # fmt: skip
# Options whose values sbatch judges: they stand between blanks, so that each keeps its good value.
JUDGED = [
    "-N2", "-n4", "-c1", "--nodes=2", "--ntasks=4", "--exclusive", "-k", "-koff", "-t10", "--time=1:00:00",
    "--open-mode=append",
]  # fmt: skip
# No word here begins with a letter that is an option whose value sbatch judges: it may be glued to a lone dash.
BAD = [
    "--node=2", "--ntask=4", "--t", "--nope", "--nope=1", "--ntasks_per_node=4", "-P x", "-R", "--hold=3", "-Hu",
    "ztray", "--job-name", "-J", "--", "-", "-- -J x", "#c", '""', "''", "\\", "hetjob", "HetJob # c", "packjob x",
    "hetjobs", ":", " : x", "z:y", "zon't", '"zpen', "z\\ y", "\\#x", "z#y", "-J a\\nb", "\u2013nodes=2", "\u00a0",
    "ä", "-ä", "--ä", "\x0b", "\x0c", "--no-requeue=1", "-W1", "--exclusiv", "--=3", "-=3", "-:", "\\\\", "'z\\'",
    "--requeue=x", "-J \\", "--comment=",
]  # fmt: skip
PREFIXES = ["#SBATCH "] * 12 + [
    "#SBATCH",
    "#SBATCH\t",
    " #SBATCH ",
    "# SBATCH ",
    "##SBATCH ",
    "#sbatch ",
    "#SLURM ",
    "#",
]
PREFIXES += ["#SBATCH_", "", "  ", "\t#", "echo ", "#SBATCH  \t"]

pieces = st.one_of(st.sampled_from(TEXT), st.sampled_from(TEXT), st.sampled_from(BAD))
lines = st.builds(
    lambda prefix, words, gap: prefix + gap.join(words),
    st.sampled_from(PREFIXES),
    st.lists(pieces, max_size=4),
    st.sampled_from([" ", "  ", "\t", ""]),
)
clean_lines = st.builds(
    lambda words: "#SBATCH " + " ".join(words), st.lists(st.sampled_from(TEXT + JUDGED), min_size=1, max_size=3)
)
raw = st.lists(st.sampled_from([*"#'\"\\ \tzy-:=J\x0b", "#SBATCH", "het", "job", "ä"]), max_size=14).map("".join)
raw_lines = raw.map("#SBATCH -J".__add__)
starts = st.sampled_from(
    [*["#!/bin/bash\n"] * 20, "", "\n", "#!", "\ufeff#!/bin/sh\n", "#!/bin/sh\r\n", " #!/bin/sh\n", "#\n"]
)
ends = st.sampled_from([*["\n"] * 8, "", "\nset -e\n", "\necho \0\n", "\r\n"])
scripts = st.builds(
    lambda start, body, end: (start + "\n".join(body) + end).encode(),
    starts,
    st.lists(st.one_of(lines, clean_lines, raw_lines), max_size=5),
    ends,
)


@settings(
    max_examples=SCRIPTS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(script=scripts)
def test_words_and_refusals_are_those_of_sbatch(sbatch: Sbatch, script: bytes) -> None:
    answer = sbatch.read(script)
    ours = read_directives(script, version=sbatch.version)
    assert [word.text for word in ours.words] == answer.words
    assert [problem.message for problem in ours.problems] == answer.complaints
    for word in ours.words:
        assert script[word.start : word.end].strip(), word
