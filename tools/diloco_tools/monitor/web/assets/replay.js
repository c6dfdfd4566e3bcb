// A recorded run: a slider over its moments, and a button that goes through them.

import { get } from "./api.js";
import { $, say } from "./dom.js";

const WHOLE_RUN_S = 60; // what playing all of it takes at most
const STEP_MS = 250;

/** `show` is called with each moment, `draw` with where it is in the plots. */
export async function replay(plots, show, draw) {
  const outline = await get("/api/replay");
  const slider = $("moment");
  const last = outline.moments - 1;
  let wanted = 0;
  let isBusy = false;
  let timer = 0;
  plots.take(outline.series, outline.first_at, true);
  $("replay").hidden = false;
  slider.max = last;
  if (outline.skipped) say($("plots-note"), `${outline.skipped} damaged lines were skipped`);

  const go = async (index) => {
    wanted = index;
    if (isBusy) return; // the newest wish is met next
    isBusy = true;
    try {
      for (let shown = -1; shown !== wanted; ) {
        shown = wanted;
        const { when, words, marker } = await get(`/api/replay/${shown}`);
        if (shown === wanted) slider.value = shown; // else the slider has moved on
        say($("moment-at"), when);
        slider.setAttribute("aria-valuetext", when);
        show(words);
        draw(marker);
      }
    } catch (error) {
      say($("moment-at"), error.message);
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
    const step = Math.ceil(outline.moments / ((1000 * WHOLE_RUN_S) / STEP_MS));
    if (Number(slider.value) >= last) go(0);
    timer = setInterval(() => {
      const next = Math.min(last, Number(slider.value) + step);
      go(next);
      if (next === last) stop();
    }, STEP_MS);
  };
  slider.oninput = () => {
    stop();
    go(Number(slider.value));
  };
  await go(last);
}
