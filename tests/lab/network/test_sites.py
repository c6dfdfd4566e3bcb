"""`make sites`: a tiny run over its lines, its file and its page."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco_lab.bench.process_pool import ProcessPool
from diloco_lab.driver.records import read_document, text_of
from diloco_lab.driver.tables import filled
from diloco_lab.network.__main__ import app
from diloco_lab.network.namespaces import NoNetwork, Place, network, several_sites
from diloco_lab.network.sites.rounds import rounds
from diloco_lab.network.sites.tables import Loss, Measurement, SitesFile, blocks
from kit.paths import LAB, ROOT

COMMITTED, PAGE = LAB / "sites.json", ROOT / "docs" / "performance.md"


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
            found = {each.way: each for each in rounds(place, "0.4M", ("bf16", "fp32"), 1)}
    except NoNetwork as error:
        pytest.skip(str(error))
    assert found["star"].averaged == found["relays"].averaged == 6
    assert found["star"].bytes_up / found["relays"].bytes_up == pytest.approx(3, rel=0.15)
    assert found["star"].bytes_down / found["relays"].bytes_down == pytest.approx(3, rel=0.15)


def test_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = a_file(a_round(), RELAYS, losses=(A_LOSS,))
    path = tmp_path / "sites.json"
    path.write_text(text_of(found))
    assert read_document(path, SitesFile) == found


def test_page_in_the_repository_is_that_of_the_measurements_beside_it() -> None:
    text = PAGE.read_text()
    assert filled(text, blocks(read_document(COMMITTED, SitesFile)), "sites") == text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--page", "page.md"], "takes the file of results"),
        (["--into", "/nowhere/sites.json"], "cannot be written"),
    ],
)
def test_option_that_cannot_work_gets_a_sentence(options: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["sites", *options])
    assert result.exit_code == 2
    assert sentence in result.output
