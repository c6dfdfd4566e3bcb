"""The table of losses by codec: what is trained, what is kept, and what the rows say."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import typer

from diloco_tools.experiments import codecs
from diloco_tools.experiments.codecs import BASE, GRID, PAIRS, Way, markdown, missing, train

LAST = ["+2.00%", "1.41% |"]  # of 1% and 3%
TINY = replace(BASE, sync_every=2, rounds=2, batch=1)


@pytest.mark.parametrize("pair", PAIRS)
def test_pair_is_trained_and_the_same_seed_gives_the_same_loss(pair: str) -> None:
    text = codecs.texts(TINY)
    first = train(pair, TINY, 0, text)
    assert 3.0 < first < 6.0
    assert train(pair, TINY, 0, text) == first
    assert (train(PAIRS[0], TINY, 0, text) == first) is (pair == PAIRS[0])


def test_rounds_lower_the_loss_of_what_is_held() -> None:
    """Each replica has a memory of its own, and what it learns arrives."""
    setting = replace(BASE, sync_every=10, rounds=20)
    text = codecs.texts(setting)
    short, long = (train(PAIRS[0], replace(setting, rounds=n), 0, text) for n in (2, 20))
    assert long < short - 0.4


def test_second_text_is_another() -> None:
    code, prose = (codecs.texts(replace(TINY, text=name)) for name in codecs.TEXTS)
    assert not torch.equal(code.shards[0][:1000], prose.shards[0][:1000])


def test_with_feedback_all_that_was_meant_arrives_in_the_end() -> None:
    torch.manual_seed(0)
    meant = [torch.randn(600) for _ in range(20)]
    for feedback, most in ((True, 1.0), (False, 100.0)):
        way = Way("int4z", feedback=feedback)
        arrived = sum((way(each) for each in meant), torch.zeros(600))
        apart = float((sum(meant, torch.zeros(600)) - arrived).abs().max())
        assert apart < most
        assert (apart < 0.7) is feedback


def test_interrupted_table_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[str, int]] = []

    def noted(pair: str, setting: object, seed: int, text: object) -> float:
        trained.append((pair, seed))
        return 2.0 + seed + PAIRS.index(pair) / 100

    monkeypatch.setattr(codecs, "train", noted)
    out = tmp_path / "losses.jsonl"
    codecs.main(out, seeds=1, pairs="bf16/fp32,int4/int4", settings="0")
    codecs.main(out, seeds=2, pairs="bf16/fp32,int4/int4", settings="0")
    assert trained == [(pair, seed) for seed in (0, 1) for pair in ("bf16/fp32", "int4/int4")]
    codecs.main(out, only_table=True)
    assert len(trained) == 4


def test_all_codecs_of_a_seed_come_before_the_next_seed() -> None:
    order = [(seed, pair) for _, seed, pair in missing([], GRID[:1], PAIRS, 2)]
    assert order == [(seed, pair) for seed in (0, 1) for pair in PAIRS]


def test_rows_have_paired_differences_and_their_spread() -> None:
    done = [
        {"setting": asdict(BASE), "seed": seed, "pair": pair, "loss": loss}
        for pair, losses in (("bf16/fp32", (2.0, 4.0)), ("int8/int8", (2.02, 4.12)))
        for seed, loss in enumerate(losses)
    ]
    row = markdown(done).splitlines()[-1].split(" | ")
    assert row == ["| 0.4M, code, H=25, M=2", "int8/int8", "8.06 / 8.06", "2", "3.0700", *LAST]


@pytest.mark.parametrize("wrong", [{"pairs": "int2/fp32"}, {"settings": "9"}])
def test_what_cannot_be_meant_is_refused(tmp_path: Path, wrong: dict[str, str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        codecs.main(tmp_path / "none.jsonl", **wrong)  # type: ignore[arg-type]
    assert ended.value.exit_code == 2
