"""`make sites`: the lines that it makes, its file and page, and a tiny run over them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco_lab.bench.process_pool import ProcessPool
from diloco_lab.driver import page
from diloco_lab.driver.records import BadFile, text_of
from diloco_lab.network import cli
from diloco_lab.network.namespaces import (
    NAMES,
    PREFIX,
    Network,
    NoNetwork,
    network,
    several_sites,
)
from diloco_lab.network.place import Place
from diloco_lab.network.sites.records import Loss, Measurement, SitesFile, Trained, read
from diloco_lab.network.sites.rounds import rounds
from diloco_lab.network.sites.tables import blocks, tables
from kit.paths import LAB

COMMITTED, PAGE = LAB / "sites.json", LAB / "SITES.md"
DELAY_S, MOVED = 0.03, 250_000
# Takes all bytes of one connection, and answers with one.
TAKE = """
import socket
server = socket.create_server(("", 1000))
print("ready", flush=True)
connection, _ = server.accept()
while connection.recv(65536):
    pass
connection.sendall(b"!")
"""
GIVE = f"""
import socket, time
began = time.monotonic()
connection = socket.create_connection(("198.18.0.1", 1000), 20)
print(time.monotonic() - began)
connection.settimeout(30)
connection.sendall(bytes({MOVED}))
connection.shutdown(socket.SHUT_WR)
assert connection.recv(1) == b"!"
"""


@contextlib.contextmanager
def a_network(folder: Path) -> Iterator[Network]:
    """Two sites of one worker, or the test is skipped with the reason why there are none."""
    with contextlib.ExitStack() as stack:
        try:
            members = several_sites(2, 1)
            made = stack.enter_context(network(members, folder=folder, delay_s=DELAY_S))
        except NoNetwork as error:
            pytest.skip(str(error))
        made.set_wan(2e7)
        yield made


def give(of: Network, member: str) -> float:
    """Move some bytes to the hub. Seconds until there was a connection."""
    python = (sys.executable, "-c")
    with subprocess.Popen([*of.inside("hub"), *python, TAKE], stdout=subprocess.PIPE) as taker:
        try:
            assert taker.stdout is not None
            assert taker.stdout.readline() == b"ready\n"
            found = subprocess.run(
                [*of.inside(member), *python, GIVE],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
        finally:
            taker.kill()
    return float(found.stdout)


def a_round(**changes: object) -> Measurement:
    usual = Measurement(
        way="star",
        parameters=10**7,
        sites=2,
        workers=6,
        wire_dtype="bf16",
        reply_dtype="fp32",
        wan_bits_per_s=5e7,
        delay_s=0.04,
        seconds=(30.0,),
        bytes_up=1.2e8,
        bytes_down=2.4e8,
        averaged=6,
        load=0.1,
        at="2026-01-01T00:00:00+00:00",
    )
    return replace(usual, **changes)  # type: ignore[arg-type]  # by name


def a_file(*rounds_: Measurement, losses: tuple[Loss, ...] = ()) -> SitesFile:
    return SitesFile("python -m diloco_lab.network sites", {"cores": 2}, rounds_, losses)


RELAYS = a_round(way="relays", seconds=(12.0,), bytes_up=4e7, bytes_down=8e7)
A_LOSS = Loss("relay killed", 9.0, 2.0, None, 6, "2026-01-01T00:01:00+00:00")


# The network


def test_line_of_a_site_has_its_delay_and_counts_its_bytes(tmp_path: Path) -> None:
    with a_network(tmp_path) as made:
        until_connected = give(made, "worker-0-0")
        there, elsewhere = made.wan_carried(0), made.wan_carried(1)
    assert until_connected >= 2 * DELAY_S
    assert MOVED < there.up < 1.2 * MOVED
    assert there.down < MOVED / 5  # acknowledgements
    assert elsewhere.up < MOVED / 10


def test_line_that_is_cut_carries_nothing_and_everything_after(tmp_path: Path) -> None:
    with a_network(tmp_path) as made:
        made.cut(0)
        with pytest.raises(subprocess.CalledProcessError):
            _ping(made)
        made.mend(0)
        end = time.monotonic() + 20
        while True:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ping(made)
                break
            assert time.monotonic() < end, "the line is mended, and carries nothing"


def _ping(of: Network) -> None:
    """One packet to the hub and back; raises CalledProcessError where none comes back."""
    program = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_STREAM); s.settimeout(0.5)\n"
        "try: s.connect(('198.18.0.1', 9))\n"
        "except ConnectionRefusedError: pass\n"  # somebody is there, and says that nobody listens
    )
    subprocess.run(
        [*of.inside("worker-0-0"), sys.executable, "-c", program],
        check=True,
        capture_output=True,
        timeout=20,
    )


def test_nothing_is_left_of_a_network(tmp_path: Path) -> None:
    with a_network(tmp_path):
        assert any(each.name.startswith(f"{PREFIX}-{os.getpid()}-") for each in NAMES.glob("*"))
    assert not list(NAMES.glob(f"{PREFIX}-{os.getpid()}-*"))
    assert not [name for _, name in socket.if_nameindex() if name.startswith(("away", "to0"))]


@pytest.mark.slow
def test_relays_carry_a_third_of_the_bytes(tmp_path: Path) -> None:
    """Three workers at each site: by the token buckets, with all headers."""
    try:
        members = several_sites(2, 3)
        with (
            network(members, folder=tmp_path, delay_s=0.01) as made,
            ProcessPool(tmp_path, 0) as pool,
        ):
            place = Place(made, pool)
            found = {
                way: rounds(place, "0.4M", ("bf16", "fp32"), way, 1) for way in ("star", "relays")
            }
    except NoNetwork as error:
        pytest.skip(str(error))
    assert found["star"].averaged == found["relays"].averaged == 6
    assert found["star"].bytes_up / found["relays"].bytes_up == pytest.approx(3, rel=0.15)
    assert found["star"].bytes_down / found["relays"].bytes_down == pytest.approx(3, rel=0.15)


# The file and the page


def test_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    trained = Trained("each round goes up", 0, 480, 2.1, 24, "2026-01-01T00:02:00+00:00")
    found = replace(a_file(a_round(), RELAYS, losses=(A_LOSS,)), trained=(trained,))
    path = tmp_path / "sites.json"
    path.write_text(text_of(found))
    assert read(path) == found


@pytest.mark.parametrize("text", ["", "[]", '{"rounds": [{"way": "star"}]}', "no JSON"])
def test_what_is_no_file_of_measurements_gets_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sites.json"
    path.write_text(text)
    with pytest.raises(BadFile, match="holds no measurements of this program"):
        read(path)


def test_relays_are_held_against_the_star_of_the_same_codecs() -> None:
    other = a_round(wire_dtype="int4z", reply_dtype="int4z", seconds=(3.0,))
    whole = a_round(way="whole", seconds=(36.0,))
    (table,) = tables(a_file(a_round(), whole, RELAYS, other))
    assert table.rows[2][3:] == ("12.0 s", "0.40", "0.33", "120.0 MB, 1/3.0")
    assert table.rows[0][4:] == ("-", "-", "360.0 MB")


def test_page_in_the_repository_is_that_of_the_measurements_beside_it() -> None:
    text = PAGE.read_text()
    assert page.filled(text, blocks(read(COMMITTED))) == text


def test_page_may_ask_for_what_was_not_measured() -> None:
    filled = page.filled("<!-- table: losses -->\n<!-- end -->", blocks(a_file(a_round())))
    assert "Nothing was measured for this." in filled


# The command


def test_command_without_root_says_why_it_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    result = CliRunner().invoke(cli.app, ["sites", "--out", str(tmp_path / "out")])
    assert result.exit_code == cli.SKIPPED
    assert "takes root" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--parameters", "11M"], "is unknown here; choose from"),
        (["--page"], "takes the file of measurements"),
        (["--into", "/nowhere/sites.json"], "cannot be written"),
    ],
)
def test_option_that_cannot_work_gets_a_sentence(options: list[str], sentence: str) -> None:
    result = CliRunner().invoke(cli.app, ["sites", *options])
    assert result.exit_code == 2
    assert sentence in result.output


def test_page_is_written_without_measuring(tmp_path: Path) -> None:
    into = tmp_path / "sites.json"
    into.write_text(text_of(a_file(a_round(), RELAYS, losses=(A_LOSS,))))
    (tmp_path / "SITES.md").write_text("<!-- table: rounds -->\n<!-- end -->\n")
    assert CliRunner().invoke(cli.app, ["sites", "--page", "--into", str(into)]).exit_code == 0
    assert "| 0.40 |" in (tmp_path / "SITES.md").read_text()
    assert json.loads(into.read_text())["losses"][0]["what"] == "relay killed"
