/* "Blocks, block tables and preemption": draws what docs/tooling/scenes/blocks.py has recorded from the library.
 *
 * The recording is read by the rules in docs/tooling/scenes/_blocks_encoding.py. Nothing here knows what a scheduler does.
 */
"use strict";

(() => {
  const {Player, EventList, element, count, listed} = window.radixkv;
  const data = window.radixkvBlocks;
  const root = document.getElementById("rk-blocks");
  const part = (name) => root.querySelector(`[data-blocks="${name}"]`);
  const {blockSize, slab, hostBlocks, requests: asked} = data;

  // -- reading the recording -----------------------------------------------------------------------------------

  const number = new Map([...data.digits].map((digit, value) => [digit, value]));
  const numbers = (text) => [...text].map((digit) => (digit === "~" ? -1 : number.get(digit)));

  const nobody = () => ({
    requests: asked.map(() => ({state: "-", known: 0, computed: 0, table: [], host: []})),
    cached: new Map(),
    counters: Object.fromEntries(data.counters.map((name) => [name, 0])),
    events: [],
  });

  /** The state after a step, from the state before it and what the step changes. */
  function advance(was, step) {
    const now = {requests: was.requests.slice(), cached: new Map(was.cached), counters: {...was.counters}, events: []};
    const told = new Set();
    for (const change of step ? step.split(",") : []) {
      const kind = change[0];
      const rest = change.slice(1);
      if (kind === "!") readTree(now.cached, numbers(rest));
      else if (kind === "#") readCounters(now.counters, numbers(rest));
      else if (kind === ">") now.events.push(data.events[Number(rest)]);
      else {
        told.add(number.get(kind));
        now.requests[number.get(kind)] = readRequest(was.requests[number.get(kind)], rest);
      }
    }
    now.requests = now.requests.map((request, i) => (request.state === "R" && !told.has(i) ? grown(request) : request));
    return now;
  }
  const grown = (request, ...blocks) => ({
    ...request, known: request.known + 1, computed: request.computed + 1, table: [...request.table, ...blocks],
  });
  function readRequest(was, text) {
    if (text === "=") return was;
    if (text[0] === "+") return grown(was, ...numbers(text.slice(1)));
    const [own, host = ""] = text.split(".");
    const [known, computed, ...table] = numbers(own.slice(1));
    return {state: own[0], known, computed, table, host: numbers(host)};
  }
  function readTree(cached, values) {
    for (let i = 0; i < values.length; i += 4) {
      const [block, writer, logical, rows] = values.slice(i, i + 4);
      if (rows) cached.set(block, {writer, logical, rows});
      else cached.delete(block);
    }
  }
  function readCounters(counters, values) {
    for (let i = 0; i < values.length; i += 4) {
      const [place, a, b, c] = values.slice(i, i + 4);
      counters[data.counters[place]] = (a * 64 + b) * 64 + c;
    }
  }

  function stepsOf(run) {
    const [parent, common, ...own] = data.runs[run];
    return common ? [...stepsOf(parent).slice(0, common), ...own] : own;
  }
  const runs = new Map();
  /** All states of a setting, from before the first step. */
  function statesOf({pool, mode, share, keep}) {
    const run = data.settings[`${mode}${Number(share)}${Number(keep)}`][pool - data.pool.min];
    if (!runs.has(run)) {
      const states = [nobody()];
      for (const step of stepsOf(run)) states.push(advance(states.at(-1), data.steps[step]));
      runs.set(run, states);
    }
    return runs.get(run);
  }

  // -- what a state says of a block ----------------------------------------------------------------------------

  /** Words of a request, of one of its logical blocks; as many as have KV. */
  const wordsOf = (request, logical, rows) =>
    asked[request].tokens.slice(logical * blockSize, logical * blockSize + rows).map((token) => data.words[token]);

  /** Each physical block: who holds it (request and logical block), filled slots, whether it is cached. */
  function blocksOf(state, pool) {
    const blocks = Array.from({length: pool}, (_, id) => ({id, holders: [], filled: 0, cached: state.cached.get(id)}));
    state.requests.forEach(({table, computed}, request) => table.forEach((id, logical) => {
      blocks[id].holders.push({request, logical});
      blocks[id].filled = Math.max(blocks[id].filled, Math.min(blockSize, computed - logical * blockSize));
    }));
    for (const block of blocks) if (!block.holders.length && block.cached) block.filled = block.cached.rows;
    return blocks;
  }
  function hostBlocksOf(state) {
    const blocks = Array.from({length: hostBlocks}, (_, id) => ({id, holders: [], filled: 0}));
    state.requests.forEach(({host, computed}, request) => host.forEach((id, logical) => {
      if (id < 0) return;
      blocks[id].holders.push({request, logical});
      blocks[id].filled = Math.min(blockSize, computed - logical * blockSize);
    }));
    return blocks;
  }

  /** A request, wherever it is named: its number, with colour and pattern. */
  const tag = (request) => element("span", {class: `rkb-tag rk-r${request}`}, element("b", {text: request}));
  const named = (request) => [element("span", {class: "rk-hidden", text: "Request "}), tag(request)];

  // -- the grid of blocks --------------------------------------------------------------------------------------

  const COLUMNS = 7;

  /** Cells of a grid. Those that stay are kept, with the focus and what is pinned. */
  function gridCells(grid, size, kind) {
    const cells = [...grid.querySelectorAll(".rkb-block")];
    if (cells.length === size) return cells;
    for (let id = cells.length; id < size; id++) {
      cells.push(element("div", {
        class: "rkb-block", role: "gridcell", tabindex: -1, "aria-describedby": "rkb-words", "data-kind": kind, "data-id": id,
      }));
    }
    cells.length = size;
    if (!cells.some(({tabIndex}) => tabIndex === 0)) cells[0].tabIndex = 0;
    const rows = [];
    for (let i = 0; i < size; i += COLUMNS) rows.push(element("div", {role: "row"}, ...cells.slice(i, i + COLUMNS)));
    grid.replaceChildren(...rows);
    return cells;
  }

  function stateOf({holders, cached}) {
    if (holders.length > 1) return "shared";
    if (holders.length) return "held";
    return cached ? "idle" : "free";
  }
  const MARKS = {
    shared: () => "S",
    held: ({holders}) => String(holders[0].request),
    idle: () => "◇",
    free: () => "",
  };
  const SAID = {
    shared: ({holders}) => `shared by requests ${listed(holders.map(({request}) => request))}`,
    held: ({holders}) => `held by request ${holders[0].request}`,
    idle: ({cached}) => `cached, held by nobody, written by request ${cached.writer}`,
    free: () => "free",
  };
  const filledText = ({filled}) => `${filled} of ${blockSize} slots filled`;

  /** As much of a block as is filled, in the colours and patterns of requests. */
  function fillOf(requests, filled) {
    const fill = element("span", {class: "rkb-fill"}, ...requests.map((request) => element("i", {class: `rk-r${request}`})));
    fill.style.width = `${(100 * filled) / blockSize}%`;
    return fill;
  }

  function drawBlock(cell, block, name) {
    const state = stateOf(block);
    const colours = state === "idle" ? [block.cached.writer] : block.holders.map(({request}) => request);
    const key = [state, block.filled, ...colours].join();
    cell.setAttribute("aria-label", state === "free" ? `${name} ${block.id}: free` :
      `${name} ${block.id}: ${SAID[state](block)}, ${filledText(block)}`);
    if (cell.dataset.key === key) return;
    cell.dataset.key = key;
    cell.className = `rkb-block rkb-block--${state}`;
    cell.replaceChildren(
      element("span", {class: "rkb-id", text: block.id}),
      element("span", {class: "rkb-slots"}, fillOf(colours, block.filled)),
      ...(MARKS[state](block) ? [element("b", {class: "rkb-mark", text: MARKS[state](block)})] : []),
    );
  }

  function drawGrid(grid, blocks, kind, name) {
    gridCells(grid, blocks.length, kind).forEach((cell, id) => drawBlock(cell, blocks[id], name));
  }

  // -- block tables --------------------------------------------------------------------------------------------

  const width = Math.max(...asked.map(({tokens}) => Math.ceil(tokens.length / blockSize)));
  const rows = buildTables();

  function buildTables() {
    const head = element("tr", {role: "row"},
      element("th", {scope: "col", role: "columnheader"}, element("span", {class: "rk-hidden", text: "Request"})),
      ...Array.from({length: width}, (_, logical) => element("th", {scope: "col", role: "columnheader", text: logical})));
    const made = asked.map((_, request) => buildRow(request));
    part("tables").append(element("thead", {role: "rowgroup"}, head),
      element("tbody", {role: "rowgroup"}, ...made.map(({row}) => row)));
    return made;
  }
  function buildRow(request) {
    const said = element("span", {class: "rkb-said"});
    const name = element("th", {scope: "row", role: "rowheader", class: "rkb-name"}, ...named(request), said);
    const cells = Array.from({length: width}, (_, logical) => element("td", {
      role: "gridcell", class: "rkb-entry", "aria-describedby": "rkb-words", "data-request": request, "data-logical": logical,
    }));
    return {row: element("tr", {role: "row"}, name, ...cells), said, cells};
  }

  const STATES = {"-": "To come", W: "Waiting", R: "Running", S: "Swapped", F: "Finished"};

  function saidOf(request, {state, known}) {
    const {arrives, prompt, tokens} = asked[request];
    if (state === "-") return ["To come", `arrives at step ${arrives}`];
    if (state === "F") return ["Finished", `${tokens.length} tokens`];
    const progress = known > prompt ? `${known} of ${tokens.length} tokens` : `prompt of ${prompt} tokens`;
    return [STATES[state], progress];
  }

  function drawTables(state, blocks) {
    state.requests.forEach((seen, request) => {
      const {row, said, cells} = rows[request];
      const [first, second] = saidOf(request, seen);
      said.replaceChildren(element("b", {text: first}), element("small", {text: second}));
      row.className = `rkb-row rkb-row--${STATES[seen.state].toLowerCase().replace(" ", "-")}`;
      row.classList.toggle("rkb-row--none", !seen.table.length && !seen.host.length);
      cells.forEach((cell, logical) => drawEntry(cell, request, logical, seen, blocks));
    });
    const full = part("tables").querySelectorAll(".rkb-entry--full");
    if (full.length && ![...full].some(({tabIndex}) => tabIndex === 0)) stopAt(full[0]);
  }

  function drawEntry(cell, request, logical, {table, host, computed}, blocks) {
    const inHost = !table.length && (host[logical] ?? -1) >= 0;
    const id = inHost ? host[logical] : table[logical];
    cell.className = "rkb-entry";
    if (id === undefined) {
      clearEntry(cell);
      return;
    }
    const filled = Math.min(blockSize, computed - logical * blockSize);
    const shared = !inHost && blocks[id].holders.length > 1;
    cell.dataset.id = id;
    cell.dataset.kind = inHost ? "host" : "pool";
    cell.classList.add("rkb-entry--full");
    cell.classList.toggle("rkb-entry--host", inHost);
    if (!cell.hasAttribute("tabindex")) cell.tabIndex = -1;
    cell.setAttribute("aria-label", `Request ${request}, logical block ${logical}: ${inHost ? "host" : "physical"} block ${id}` +
      `${shared ? ", shared" : ""}, ${filledText({filled})}`);
    cell.replaceChildren(fillOf([request], filled), element("span", {class: "rkb-physical", text: inHost ? `h${id}` : id}),
      ...(shared ? [element("sup", {text: "S"})] : []));
  }
  function clearEntry(cell) {
    delete cell.dataset.id;
    cell.replaceChildren();
    cell.removeAttribute("aria-label");
    if (document.activeElement !== cell) cell.removeAttribute("tabindex");
  }

  // -- lists, counters, events ---------------------------------------------------------------------------------

  const lists = new Map(["R", "W", "S", "F", "-"].map((state) => {
    const list = element("ul", {"aria-label": STATES[state]});
    part("lists").append(element("div", {class: "rkb-list", "data-list": STATES[state]},
      element("h3", {text: STATES[state]}), list));
    return [state, list];
  }));

  function drawLists(states, step) {
    const now = states[step];
    const paused = (request) => now.requests[request].state === "W" && now.requests[request].known > asked[request].prompt;
    for (const [state, list] of lists) {
      const members = asked.map((_, request) => request).filter((request) => now.requests[request].state === state);
      list.replaceChildren(...members.map((request) => {
        const item = element("li", {"data-request": request}, ...named(request));
        if (paused(request)) item.append(element("small", {text: "preempted"}));
        return item;
      }));
    }
  }

  const COUNTERS = [
    ["used", "Blocks used", (c, pool) => `${c.used} / ${pool}`, (c, pool) => `${c.cached} cached, ${pool - c.used - c.cached} free`,
      (c, pool) => c.used / pool],
    ["slack", "Paged slack", (c) => count(c.slack, "slot"), null, (c) => c.slack / (slab * asked.length)],
    ["contiguous", "Contiguous waste", (c) => count(c.contiguous, "slot"),
      (c, pool, running) => (running ? `${running} × ${slab} = ${running * slab} slots; the pool has ${pool * blockSize}` : `slabs of ${slab} slots`),
      (c) => c.contiguous / (slab * asked.length)],
    ["shared", "Shared tokens stored once", (c) => String(c.shared), null, null],
    ["to_recompute", "Preempted, to recompute (tokens)", (c) => String(c.to_recompute), (c) => `${c.recomputed} computed again so far`, null],
  ].map(([name, label, text, small, share]) => {
    const value = element("b", {"data-counter": name});
    const note = element("small");
    const bar = element("span", {class: "rkb-meter", "aria-hidden": "true"}, element("i"));
    part("counters").append(element("div", {class: `rkb-counter rkb-counter--${name}`}, element("dt", {text: label}),
      element("dd", {}, value, ...(small ? [note] : []), ...(share ? [bar] : []))));
    return (counters, pool, running) => {
      value.textContent = text(counters, pool);
      if (small) note.textContent = small(counters, pool, running);
      if (share) bar.firstChild.style.width = `${100 * Math.min(1, share(counters, pool))}%`;
    };
  });

  const events = new EventList(part("events"), (step) => player.go(step));
  const eventsOf = (states) => states.flatMap((state, step) => state.events.map(([kind, , text]) => ({step, kind, text})));
  const textOf = (state) => state.events.map(([, , text]) => text).join(" ");

  function drawEvents(states, step) {
    events.fill(states, () => eventsOf(states));
    events.show(step);
    const latest = states.slice(0, step + 1).findLastIndex((state) => state.events.length);
    part("latest").parentElement.classList.toggle("rkb-latest--past", latest < step);
    part("latest").textContent = latest < 0 ? "Nothing has happened yet: all blocks are free. Press Step or Play." :
      `Step ${latest}. ${textOf(states[latest])}`;
  }

  // -- what is pointed at --------------------------------------------------------------------------------------

  let drawn = null; // {blocks, host}
  const pointed = {hover: null, focus: null, pinned: null}; // cells

  /** Which block a cell stands for; none if it has gone, or is not seen. */
  function targetOf(cell) {
    if (!cell?.isConnected || cell.dataset.id === undefined || cell.closest("[hidden]")) return null;
    return {kind: cell.dataset.kind, id: Number(cell.dataset.id)};
  }

  function showPointed() {
    for (const cell of root.querySelectorAll(".rkb-linked")) cell.classList.remove("rkb-linked");
    part("arrows").querySelectorAll("path.rkb-arrow").forEach((path) => path.remove());
    const target = targetOf(pointed.hover) ?? targetOf(pointed.focus) ?? targetOf(pointed.pinned);
    showInspector(target);
    if (!target) return;
    const cell = part(target.kind).querySelector(`[data-id="${target.id}"]`);
    cell.classList.add("rkb-linked");
    const entries = part("tables").querySelectorAll(`.rkb-entry--full[data-kind="${target.kind}"][data-id="${target.id}"]`);
    for (const entry of entries) {
      entry.classList.add("rkb-linked");
      drawArrow(entry, cell);
    }
  }

  /** From a block table's entry to the block. */
  function drawArrow(entry, cell) {
    const area = part("main").getBoundingClientRect();
    const [from, to] = [entry.getBoundingClientRect(), cell.getBoundingClientRect()];
    const leftwards = to.right < from.left;
    const start = leftwards ? [from.left, from.top + from.height / 2] : [from.left + from.width / 2, from.top];
    const end = leftwards ? [to.right + 2, to.top + to.height / 2] : [to.left + to.width / 2, to.bottom + 2];
    const [x1, y1, x2, y2] = [start[0] - area.left, start[1] - area.top, end[0] - area.left, end[1] - area.top];
    const bend = leftwards ? Math.max(24, (x1 - x2) / 3) : Math.max(24, (y1 - y2) / 3);
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("class", "rkb-arrow");
    path.setAttribute("marker-end", "url(#rkb-head)");
    path.setAttribute("d", leftwards ? `M${x1} ${y1}C${x1 - bend} ${y1} ${x2 + bend} ${y2} ${x2} ${y2}` :
      `M${x1} ${y1}C${x1} ${y1 - bend} ${x2} ${y2 + bend} ${x2} ${y2}`);
    part("arrows").append(path);
  }

  function showInspector(target) {
    if (!target) {
      const hint = "Point at a block, or at an entry of a block table, to see what it holds and whose it is.";
      part("inspector").replaceChildren(element("p", {class: "rkb-hint", text: hint}));
      return;
    }
    const block = (target.kind === "host" ? drawn.host : drawn.blocks)[target.id];
    const places = block.holders.length ? block.holders : block.cached ? [{request: block.cached.writer, ...block.cached}] : [];
    const words = places.length ? wordsOf(places[0].request, places[0].logical, block.filled) : [];
    const name = `${target.kind === "host" ? "Host block" : "Block"} ${target.id}`;
    part("inspector").replaceChildren(
      element("p", {}, element("b", {text: name}), ` ${placedText(block, places)}.`),
      element("p", {class: "rkb-words", id: "rkb-words"}, ...Array.from({length: blockSize}, (_, slot) =>
        element("span", {class: words[slot] ? "rkb-word" : "rkb-word rkb-word--none", text: words[slot] ?? "empty"}))),
    );
  }
  /** Whose it is, which of their logical blocks, and what of it is cached. */
  function placedText(block, places) {
    const parts = [SAID[stateOf(block)](block)];
    if (places.length) parts.push(`logical block ${listed([...new Set(places.map(({logical}) => logical))])}`);
    if (block.holders.length && block.cached) {
      parts.push(block.cached.rows === blockSize ? "in the radix tree" : `${count(block.cached.rows, "slot")} in the radix tree`);
    }
    return parts.join(", ");
  }

  const cellOf = (target) => target instanceof Element && target.closest(".rkb-block, .rkb-entry--full");

  root.addEventListener("pointerover", (event) => {
    if (event.pointerType === "touch") return;
    const cell = cellOf(event.target) || null;
    if (cell !== pointed.hover) {
      pointed.hover = cell;
      showPointed();
    }
  });
  root.addEventListener("pointerleave", () => {
    pointed.hover = null;
    showPointed();
  });
  // A click, or a finger, pins: what is pinned stays pointed at while steps go by.
  part("main").addEventListener("click", (event) => {
    const cell = cellOf(event.target) || null;
    if (!cell && event.target.closest("button")) return;
    pointed.pinned = cell === pointed.pinned ? null : cell;
    showPointed();
  });
  // The mouse does not move the focus: arrow keys would then go from block to block instead of from step to step.
  root.addEventListener("mousedown", (event) => {
    if (cellOf(event.target)) event.preventDefault();
  });
  root.addEventListener("focusin", (event) => {
    const cell = cellOf(event.target);
    pointed.focus = cell || null;
    if (cell) stopAt(cell);
    showPointed();
  });
  root.addEventListener("focusout", () => {
    pointed.focus = null;
    showPointed();
  });

  /** The tab key leads to this cell of its grid, and to no other. */
  function stopAt(cell) {
    for (const other of cell.closest('[role="grid"]').querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
    cell.tabIndex = 0;
  }

  const MOVES = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};
  root.addEventListener("keydown", (event) => {
    const cell = cellOf(event.target);
    if (!cell || event.target !== cell || event.ctrlKey || event.altKey || event.metaKey) return;
    if (!(event.key in MOVES)) return;
    event.preventDefault(); // not the player's, while a block has the focus
    const [down, right] = MOVES[event.key];
    const matrix = cell.matches(".rkb-entry") ? rows.map(({cells}) => cells) :
      [...cell.closest('[role="grid"]').children].map((row) => [...row.children]);
    let y = matrix.findIndex((row) => row.includes(cell));
    let x = matrix[y].indexOf(cell);
    for (;;) {
      y += down;
      x += right;
      const next = matrix[y]?.[x];
      if (!next) return;
      if (cellOf(next)) {
        next.focus();
        return;
      }
    }
  });

  // -- the whole -----------------------------------------------------------------------------------------------

  function draw(values, step) {
    const states = statesOf(values);
    const state = states[step];
    drawn = {blocks: blocksOf(state, values.pool), host: hostBlocksOf(state)};
    part("pool-size").textContent = `${values.pool} blocks of ${blockSize} tokens`;
    drawGrid(part("pool"), drawn.blocks, "pool", "Block");
    part("host-section").hidden = values.mode !== "swap";
    part("host-size").textContent = `${hostBlocks} blocks`;
    drawGrid(part("host"), drawn.host, "host", "Host block");
    drawTables(state, drawn.blocks);
    drawLists(states, step);
    const running = state.requests.filter((request) => request.state === "R").length;
    for (const show of COUNTERS) show(state.counters, values.pool, running);
    drawEvents(states, step);
    showPointed();
  }

  const MARKED = new Set(["start", "share", "preempt", "resume", "end"]);
  const player = new Player(root, {
    options: [
      {name: "pool", label: "Pool size", kind: "range", ...data.pool, text: (n) => `${n} blocks, ${n * blockSize} tokens`},
      {name: "mode", label: "Preemption", kind: "radio", value: "recompute", choices: [["recompute", "Recompute"], ["swap", "Swap"]]},
      {name: "share", label: "Share prefixes", kind: "check", value: true},
      {name: "keep", label: "Keep cached", kind: "check", value: true},
    ],
    numSteps: (values) => statesOf(values).length,
    draw,
    say: (values, step) => textOf(statesOf(values)[step]) || "No event.",
    marks: (values) => eventsOf(statesOf(values)).filter(({kind}) => MARKED.has(kind))
      .map(({step, kind, text}) => ({step, kind, label: text})),
  });
  addEventListener("resize", showPointed);
})();
