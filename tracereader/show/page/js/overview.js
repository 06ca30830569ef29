// The top of the page: the device, the step's time, its limit, and the changes to try.

const PART_COLORS = {
  compute: "var(--part-compute)", communication: "var(--family-communication)", copy: "var(--family-copy)",
  not_launched: "var(--idle-not-launched)", launched: "var(--idle-launched)", unknown: "var(--idle-unknown)",
  elsewhere: "var(--idle-elsewhere)",
};

function overview(data) {
  const {head, time: parts} = data;
  const word = head.regime.replace(/^./, letter => letter.toUpperCase());
  return el("section", {class: "overview", id: "overview"},
    el("div", {class: "answer"},
      el("p", {class: "device"}, [head.device, head.recorded, ...head.facts].join(" · ")),
      el("h1", {id: "regime"}, `${word}`),
      el("p", {class: "why", id: "why"}, sentence(head.why)),
      head.script && el("p", {class: "told"}, `Recorded by ${head.script}.`),
      head.left_out.length > 0 && el("p", {class: "told"},
        `Step ${head.left_out.join(", ")} is left out of every figure over all steps, because it takes far longer than the others.`),
      head.busy && el("p", {class: "warning"}, el("b", {}, "Warning: "), sentence(head.busy))),
    el("dl", {class: "figures"},
      head.step_us !== null && figure("step", time(head.step_us), "step_us", head.step_us),
      head.unprofiled_us !== null && figure("without the profiler", time(head.unprofiled_us), "unprofiled_us", head.unprofiled_us),
      head.gpu && figure("GPU busy per step", time(head.gpu_us), "gpu_us", head.gpu_us),
      figure("CPU per step", time(head.cpu_us), "cpu_us", head.cpu_us),
      head.busy_share !== null && figure("GPU busy, of the time", share(head.busy_share), "busy_share", head.busy_share)),
    parts.parts.length > 0 && el("div", {class: "wide"},
      partsBar(coloredParts(parts.parts), sumOf(parts.parts), "a step's time on the GPU"), legend(coloredParts(parts.parts), sumOf(parts.parts))),
    el("div", {class: "wide"}, [["Note", head.notes], ["Warning", head.warnings]].map(([word, said]) =>
      said.map(one => el("p", {class: "told"}, el("b", {class: word.toLowerCase()}, `${word}: `), one)))));
}

function figure(title, text, key, value) {
  return el("div", {}, el("dt", {}, title), el("dd", {id: key, data: {value}}, text));
}

function sumOf(parts) {
  return parts.reduce((sum, one) => sum + one.us, 0);
}

function coloredParts(parts) {
  return parts.map(one => ({...one, color: PART_COLORS[one.key] ?? familyColor(one.family ?? "other")}));
}

function legend(parts, wholeUs) {
  return el("ul", {class: "legend"}, parts.map(one =>
    el("li", {}, swatch(one.color), one.name, " ", el("b", {}, share(one.us / wholeUs, 1)), " ", el("span", {class: "told"}, time(one.us)))));
}

// pick(opportunity): highlights its kernels.
function opportunities(data, pick) {
  const {refused, found} = data.opportunities;
  const section = el("section", {id: "try"}, el("h2", {}, "Try first"));
  if (refused) return fill(section, [el("p", {}, `No change can be priced: ${refused}.`)]);
  if (!found.length) return fill(section, [el("p", {}, "No change that read-trace knows saves more than 2% of this step.")]);
  return fill(section, [
    el("p", {class: "told"}, "Each time comes from a replay of this trace with that change alone. The savings of several changes do not add up."),
    el("ol", {class: "opportunities"}, found.map((one, place) => {
      const saved = part => `${one.basis === "bound" ? "about " : ""}${share(part)}`;
      const recorded = `${saved(Math.abs(one.saves_us) / one.step_us)} ${one.saves_us < 0 ? "longer" : "shorter"}`;
      const unprofiled = one.unprofiled_step_us_after !== null;
      const [low, high] = (one.estimated_savings || []).map(part => share(part));
      const range = low === high ? high : `${low.replace("%", "")} to ${high}`;
      const [least, most] = one.estimated_savings || [one.share, one.share];
      const [before, after] = unprofiled ? [one.unprofiled_step_us, one.unprofiled_step_us_after] : [one.step_us, one.step_us_after];
      const shows = data.hasTimeline && data.head.gpu;
      return el("li", {data: {change: one.change, saves: one.saves_us, after: one.step_us_after}},
        el("div", {class: "gain"},
          one.is_unknown ? el("b", {}, "not known from one rank")
            : [el("b", {}, one.estimated_savings ? range : saved(one.share)), el("span", {}, [...new Set([time(before), time(after)])].join(" → "))],
          !one.is_unknown && el("span", {class: "meter", "aria-hidden": "true"},
            el("span", {width: `${100 * least}%`}), el("span", {class: "maybe", width: `${100 * (most - least)}%`}))),
        el("div", {},
          el("h3", {}, `${place + 1}. ${one.title}`),
          !one.is_unknown && !unprofiled && one.estimated_savings && el("p", {}, "This is the estimated saving without the profiler. "
            + (time(one.step_us) === time(one.step_us_after) ? "The replay of the recorded step does not become shorter."
              : `The times are those of the recorded step, which the change makes ${recorded}.`)),
          !one.is_unknown && unprofiled && el("p", {}, "This is the step without the profiler. "
            + `While recorded: ${time(one.step_us)} → ${time(one.step_us_after)}, which is ${recorded}.`),
          el("p", {}, sentence(one.evidence)),
          el("p", {class: "how"}, el("b", {}, "Try: "), one.try,
            one.function && ` (in ${one.function.file}:${one.function.line}, ${one.function.name})`),
          shows && el("button", {type: "button", class: "plain", onclick: () => pick(one)},
            one.kernels.length ? `show its kernels in the timeline (${counted(one.kernels.length, "name")})` : "show the step in the timeline")));
    })),
  ]);
}

// What try-changes measured, as it prints it.
function measuredSection({measured}) {
  if (!measured) return null;
  const row = (cells, tag) => el("tr", {}, cells.map((cell, place) =>
    el(tag, {class: measured.left.includes(place) ? "" : "number"}, cell)));
  return el("section", {id: "measured"}, el("h2", {}, "What was measured"),
    el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": "what was measured"},
      el("table", {}, el("thead", {}, row(measured.heads, "th")), el("tbody", {}, measured.rows.map((cells, place) =>
        [row(cells, "td"), place in measured.below && el("tr", {}, el("td", {colspan: cells.length, class: "told"}, measured.below[place]))])))),
    measured.keep.length > 0 && [el("h3", {}, measured.keep_title), el("ul", {}, measured.keep.map(([name, how]) =>
      el("li", {}, name, ": ", el("b", {}, how))))],
    measured.said.map(one => el("p", {class: "told"}, one)));
}
