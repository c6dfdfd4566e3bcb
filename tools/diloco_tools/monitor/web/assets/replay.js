// A recorded run: a slider over its moments, and a button that goes through them.

import { say } from "./format.js";

const $ = (id) => document.getElementById(id);
const WHOLE_RUN_S = 60; // what playing all of it takes at most
const STEP_MS = 250;

export async function replay(history, show) {
  const { get } = await import("./stream.js");
  const outline = await get("/api/replay");
  const slider = $("moment");
  history.take(outline.series, 0, true);
  $("replay").hidden = false;
  slider.max = outline.moments - 1;
  let wanted = 0;
  let isBusy = false;
  let timer = 0;

  const go = async (index) => {
    wanted = index;
    if (isBusy) return; // the newest wish is met next
    isBusy = true;
    try {
      for (let shown = -1; shown !== wanted; ) {
        shown = wanted;
        const moment = await get(`/api/replay/${shown}`);
        if (shown === wanted) slider.value = shown; // else the slider has moved on
        const when = `${new Date(1000 * moment.at).toLocaleString()}, ${moment.after} after the start`;
        say($("moment-at"), when);
        slider.setAttribute("aria-valuetext", when);
        show(moment);
        history.draw(0, { number: moment.picture.snapshot.last_round?.number ?? null, elapsed: moment.at - outline.first_at });
      }
    } catch {
      say($("moment-at"), "The dashboard program does not answer.");
      stop();
    } finally {
      isBusy = false;
    }
  };

  const stop = () => {
    clearInterval(timer);
    timer = 0;
    say($("play"), "▶ Play");
  };

  $("play").onclick = () => {
    if (timer) return stop();
    say($("play"), "❚❚ Stop");
    const step = Math.max(1, Math.ceil(outline.moments / ((1000 * WHOLE_RUN_S) / STEP_MS)));
    if (Number(slider.value) >= outline.moments - 1) go(0);
    timer = setInterval(() => {
      const next = Math.min(outline.moments - 1, Number(slider.value) + step);
      go(next);
      if (next === outline.moments - 1) stop();
    }, STEP_MS);
  };
  slider.oninput = () => {
    stop();
    go(Number(slider.value));
  };
  if (outline.skipped) say($("plots-note"), `${outline.skipped} damaged lines were skipped`);
  await go(outline.moments - 1);
}
