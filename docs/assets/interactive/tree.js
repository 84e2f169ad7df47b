/* The page "The radix tree": draws what docs/tooling/scenes/tree.py recorded from RadixTree and BlockPool.
 *
 * Where a box stands is decided here; what is in it, what is cached, pinned or evicted is read from the recording.
 */
"use strict";

(() => {
  const root = document.getElementById("rk-tree");
  const recording = window.radixkvTree;
  if (!root || !recording) return;

  const SIZE = recording.blockSize;
  const ACT = Object.fromEntries(recording.acts.map((name, i) => [name, i]));
  const [LEAST, MOST] = recording.pools;
  const at = (name) => root.querySelector(`[data-tree="${name}"]`);

  // -- the recording, unpacked --------------------------------------------------------------------------------

  /**
   * @typedef {{parent: number, request: number, start: number, end: number, blocks: number[], used: number,
   *   hits: number}} TreeNode
   * @typedef {{nodes: TreeNode[], refs: number[], running: {request: number, table: number[], computed: number,
   *   tail: number[]}[], counters: Object<string, number>}} State
   * @typedef {{act: number, request: number, typed: number, hit: number, path: number[], text: string, state: State,
   *   added: number[], gone: number[], split: number[]}} Step
   */

  const kept = (make) => {
    const made = new Map();
    return (key) => {
      if (!made.has(key)) made.set(key, make(key));
      return made.get(key);
    };
  };

  const nodeAt = kept((i) => {
    const [parent, request, start, end, blocks, used, hits] = recording.nodes[i];
    return {parent, request, start, end, blocks: recording.paths[blocks], used, hits};
  });

  /** @type {(i: number) => State} */
  const stateAt = kept((i) => {
    const [nodes, refs, running, counters] = recording.states[i];
    return {
      nodes: nodes.map(nodeAt),
      refs: Array.from(refs, Number),
      running: running.map(([request, table, computed, tail]) =>
        ({request, table: recording.paths[table], computed, tail})),
      counters: Object.fromEntries(recording.counters.map((name, n) => [name, counters[n]])),
    };
  });

  /** @type {(key: string) => Step[]} */
  const runOf = kept((key) => {
    let state = null;
    return recording.runs[recording.which[key]].map((number) => {
      const packed = recording.steps[number];
      const [act, request, typed, hit, path, text] = packed;
      // Six numbers, the state if it is another one, and three marks if there are any.
      const hasMarks = packed.length >= 9;
      if (packed.length === 7 || packed.length === 10) state = stateAt(packed[6]);
      const [added, gone, split] = hasMarks ? packed.slice(-3).map((i) => recording.paths[i]) : [[], [], []];
      return {act, request, typed, hit, path: recording.paths[path], text: recording.texts[text], state,
        added, gone, split};
    });
  });

  const keyOf = ({example, pool, policy}) => `${example} ${pool} ${policy}`;

  /** The words of a request, prompt and answer. */
  const sequenceOf = kept((key) => {
    const cut = key.lastIndexOf(" ");
    const [prompt, answer] = recording.examples[key.slice(0, cut)].prompts[Number(key.slice(cut + 1))];
    return {words: [...prompt, ...answer].map((i) => recording.words[i]), prompt: prompt.length};
  });
  const wordsOf = (example, request) => sequenceOf(`${example} ${request}`);

  // -- small things -------------------------------------------------------------------------------------------

  const SVG = "http://www.w3.org/2000/svg";
  function put(parent, tag, attributes = {}, text = null) {
    const svg = parent.namespaceURI === SVG || tag === "svg";
    const made = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    if (text !== null) made.textContent = text;
    parent.append(made);
    return made;
  }
  const many = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
  const listed = (items) =>
    items.length < 2 ? String(items[0] ?? "none") : `${items.slice(0, -1).join(", ")} and ${items.at(-1)}`;

  // -- where the boxes stand ----------------------------------------------------------------------------------

  const ROW = 21, CAPTION = 15, BADGE = 33, SIGN = 14, SLOT = 45, ROOMY = 60, GAP = 28, APART = 9, TOP = 6;

  const depthsOf = (nodes) => {
    const depth = [];
    nodes.forEach((node, i) => { depth[i] = node.parent < 0 ? 0 : depth[node.parent] + 1; });
    return depth;
  };

  /** Left to right: children beside their parent, the first of them at its height. */
  function acrossLayout(nodes, slot) {
    const width = BADGE + SIZE * slot + SIGN;
    const boxes = nodes.map(() => null);
    const below = (parent, x, y) => {
      let bottom = y;
      nodes.forEach((node, i) => {
        if (node.parent !== parent) return;
        const height = CAPTION + node.blocks.length * ROW;
        boxes[i] = {x, y: bottom, width, height};
        const rest = below(i, x + width + GAP, bottom);
        bottom = Math.max(bottom + height + APART, rest);
      });
      return bottom;
    };
    const height = below(-1, 26, TOP);
    const right = Math.max(0, ...boxes.map((box) => box.x + box.width));
    return {boxes, slot, width: right + 4, height, down: false};
  }

  /** Top to bottom, for narrow screens: children below their parent, a little further in. */
  function downLayout(nodes, slot, room) {
    const depth = depthsOf(nodes);
    let y = TOP;
    const boxes = nodes.map((node, i) => {
      const box = {x: 8 + 14 * depth[i], y, width: BADGE + SIZE * slot + SIGN,
        height: CAPTION + node.blocks.length * ROW};
      y += box.height + APART;
      return box;
    });
    return {boxes, slot, width: room, height: y, down: true};
  }

  const layoutOf = (nodes, slot, room) => (room < 560 ? downLayout(nodes, slot, room) : acrossLayout(nodes, slot));

  /** The nodes that a step shows: an eviction is shown on the tree that it is taken from. */
  function shownNodes(steps, number) {
    const step = steps[number];
    const evicts = step.gone.length && (step.act === ACT.allocate || step.act === ACT.answer);
    return evicts ? steps[number - 1].state : step.state;
  }

  /** Width of a word, and height of the drawing, for all steps of a run: the page stands still while it plays. */
  const fits = new Map();
  function fitOf(key, steps, room) {
    const name = `${key} ${room}`;
    if (!fits.has(name)) {
      const trees = [...new Set(steps.map((_, i) => shownNodes(steps, i)))].map(({nodes}) => nodes);
      const deepest = Math.max(...trees.flatMap(depthsOf));
      const fixed = BADGE + SIGN;
      const slot = room < 560
        ? Math.floor((room - 12 - 14 * deepest - fixed) / SIZE)
        : Math.floor(((room - 30 + GAP) / (deepest + 1) - GAP - fixed) / SIZE);
      const used = Math.max(room < 560 ? 0 : SLOT, Math.min(slot, ROOMY));
      fits.set(name, {slot: used, height: Math.max(...trees.map((nodes) => layoutOf(nodes, used, room).height))});
    }
    return fits.get(name);
  }

  // -- the tree -----------------------------------------------------------------------------------------------

  const LOCK = "M-3 -1v-1.6a3 3 0 0 1 6 0V-1M-4 -1h8v5.6h-8z";
  const panel = at("tree");
  const svg = put(panel, "svg", {role: "img", class: "rkt-svg"});
  let wide = panel.clientWidth; // asked for once: each time costs a layout
  const defs = put(svg, "defs");
  const hatch = put(defs, "pattern", {id: "rkt-hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse",
    patternTransform: "rotate(45)"});
  put(hatch, "rect", {width: 1.4, height: 5, class: "rkt-hatch"});
  const linkLayer = put(svg, "g");
  const litLayer = put(svg, "g"); // above the other links
  const nodeLayer = put(svg, "g");
  const blockLayer = put(svg, "g");
  let blockShapes = new Map();
  let nodeShapes = new Map();

  const ruler = document.createElement("canvas").getContext("2d");
  ruler.font = `600 11.5px ${getComputedStyle(svg).fontFamily}`;
  const widthOf = kept((word) => ruler.measureText(word).width);

  function drawBlock(group, {id, words, rows, pinned, mark, width, slot}) {
    group.replaceChildren();
    group.setAttribute("class", ["rkt-block", pinned && "rkt-block--pinned", mark && `rkt-block--${mark}`]
      .filter(Boolean).join(" "));
    group.dataset.block = id;
    const height = ROW - 3;
    put(group, "rect", {class: "rkt-row", width: width - SIGN, height, rx: 3});
    put(group, "rect", {class: "rkt-badge", width: BADGE - 3, height, rx: 3});
    if (pinned) {
      put(group, "path", {class: "rkt-lock", d: LOCK, transform: `translate(7.5 ${height / 2 - 1.5})`});
    }
    put(group, "text", {class: "rkt-id", x: pinned ? 21.5 : (BADGE - 3) / 2, y: height / 2 + 4}, id);
    for (let i = 0; i < SIZE; i++) {
      const x = BADGE + i * slot;
      if (i >= words.length) {
        put(group, "rect", {class: "rkt-empty", x: x + 1.5, y: 2.5, width: slot - 4, height: height - 5, rx: 2});
        continue;
      }
      if (i < rows) {
        put(group, "rect", {class: "rkt-hit", x, y: 1, width: slot - 1, height: height - 2, rx: 2});
        put(group, "rect", {class: "rkt-hitline", x: x + 2, y: height - 3.5, width: slot - 5, height: 2});
      }
      const word = put(group, "text", {class: i < rows ? "rkt-word rkt-word--hit" : "rkt-word",
        x: x + slot / 2 - 0.5, y: height / 2 + 3.5}, words[i]);
      if (widthOf(words[i]) > slot - 3) {
        word.setAttribute("textLength", slot - 3);
        word.setAttribute("lengthAdjust", "spacingAndGlyphs");
      }
    }
    if (mark === "gone") {
      put(group, "rect", {class: "rkt-crossed", width: width - SIGN, height, rx: 3});
      put(group, "line", {class: "rkt-strike", x1: BADGE, x2: width - SIGN, y1: height / 2, y2: height / 2});
    }
    if (mark) {
      put(group, "text", {class: "rkt-sign", x: width - SIGN / 2 + 1, y: height / 2 + 5}, mark === "gone" ? "×" : "+");
    }
  }

  function drawTree(values, steps, number, still) {
    const step = steps[number];
    const {nodes, refs} = shownNodes(steps, number);
    const room = wide;
    const {slot, height} = fitOf(keyOf(values), steps, room);
    const layout = layoutOf(nodes, slot, room);
    const {boxes, down} = layout;
    const width = Math.max(layout.width, room);
    svg.classList.toggle("rkt-still", still);
    svg.classList.toggle("rkt-roomy", slot >= 54);
    // Deep trees shrink a little before they scroll.
    const scale = Math.max(0.8, Math.min(1, room / width));
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("width", width * scale);
    svg.setAttribute("height", height * scale);
    panel.style.minHeight = `${Math.max(height * scale + 2, 160)}px`;

    const gone = new Set(step.gone), added = new Set(step.added);
    const hitRows = new Map(step.path.map((id, i) => [id, Math.min(SIZE, step.hit - i * SIZE)]));
    const oldBlocks = blockShapes, oldNodes = nodeShapes;
    blockShapes = new Map();
    nodeShapes = new Map();
    linkLayer.replaceChildren();
    litLayer.replaceChildren();

    if (!down) {
      put(linkLayer, "text", {class: "rkt-root", transform: `translate(12 ${TOP + CAPTION + 26}) rotate(-90)`}, "root");
    }
    nodes.forEach((node, i) => {
      const box = boxes[i];
      const lit = node.blocks.some((id) => (hitRows.get(id) ?? 0) > 0);
      drawLink(node, box, node.parent < 0 ? null : boxes[node.parent], lit, down, step.split);

      const shape = keep(oldNodes, nodeShapes, node.blocks[0], nodeLayer);
      shape.style.transform = `translate(${box.x}px, ${box.y}px)`;
      shape.setAttribute("class", lit ? "rkt-node rkt-node--lit" : "rkt-node");
      shape.replaceChildren();
      put(shape, "rect", {class: "rkt-frame", x: -4, y: CAPTION - 3, width: box.width - SIGN + 8,
        height: node.blocks.length * ROW + 3, rx: 5});
      put(shape, "text", {class: "rkt-caption", x: -2, y: CAPTION - 6},
        `${many(node.hits, "hit")}, last used by request ${node.used + 1}`);

      const {words} = wordsOf(values.example, node.request);
      node.blocks.forEach((id, j) => {
        const from = node.start + j * SIZE;
        const mark = gone.has(id) ? "gone" : added.has(id) ? "added" : "";
        const group = keep(oldBlocks, blockShapes, id, blockLayer);
        group.style.transform = `translate(${box.x}px, ${box.y + CAPTION + j * ROW}px)`;
        drawBlock(group, {id, words: words.slice(from, Math.min(node.end, from + SIZE)), rows: hitRows.get(id) ?? 0,
          pinned: refs[id] > 1, mark, width: box.width, slot});
      });
    });
    for (const left of [...oldBlocks.values(), ...oldNodes.values()]) left.remove();
    // An evicted block goes here; when its id comes back, it is another block.
    for (const id of gone) {
      blockShapes.get(id)?.setAttribute("data-left", "");
    }
    if (!nodes.length) {
      put(linkLayer, "text", {class: "rkt-nothing", x: 40, y: TOP + CAPTION + 14}, "The tree is empty.");
    }
    svg.setAttribute("aria-label", nodes.length
      ? `The tree: ${many(nodes.length, "node")}. The list below says the same in words.` : "The tree is empty.");
    return nodes;
  }

  /** The shape of the last step with this key, or a new one. */
  function keep(old, now, key, layer) {
    let shape = old.get(key);
    if (shape && shape.hasAttribute("data-left")) shape = null;
    if (shape) old.delete(key);
    else shape = put(layer, "g");
    now.set(key, shape);
    return shape;
  }

  function drawLink(node, box, parent, lit, down, split) {
    const y = box.y + CAPTION + ROW / 2 - 1, to = box.x - 4;
    const cut = split.length > 0 && node.blocks[0] === split[1]; // where one edge became two
    let d;
    if (down) {
      if (!parent) return;
      d = `M${parent.x + 3} ${parent.y + parent.height}V${y}H${to}`;
    } else {
      const fromX = parent ? parent.x + parent.width - SIGN + 4 : 16;
      const fromY = (parent ? parent.y : TOP) + CAPTION + ROW / 2 - 1;
      d = `M${fromX} ${fromY}H${to - 20}V${y}H${to}`;
    }
    put(lit ? litLayer : linkLayer, "path", {class: lit ? "rkt-link rkt-link--lit" : "rkt-link", d});
    if (!cut) return;
    put(litLayer, "path", {class: "rkt-splitmark", d: `M${to - (down ? 7 : 13)} ${y - 5}v10m4 -10v10`});
    put(litLayer, "text", {class: "rkt-split", x: down ? box.x + box.width - SIGN - 12 : to - 10,
      y: down ? box.y + CAPTION - 6 : y - 8}, "split");
  }

  /** The same as a nested list. */
  function listTree(values, nodes, step, refs) {
    const holder = at("list");
    holder.replaceChildren();
    if (!nodes.length) put(holder, "p", {}, "The tree is empty.");
    const hits = new Map(step.path.map((id, i) => [id, Math.min(SIZE, step.hit - i * SIZE)]));
    const lists = new Map();
    nodes.forEach((node, i) => {
      if (!lists.has(node.parent)) {
        lists.set(node.parent, put(node.parent < 0 ? holder : lists.get(`in ${node.parent}`), "ul"));
      }
      const item = put(lists.get(node.parent), "li");
      lists.set(`in ${i}`, item);
      const {words} = wordsOf(values.example, node.request);
      const pinned = node.blocks.filter((id) => refs[id] > 1);
      const lit = node.blocks.reduce((sum, id) => sum + (hits.get(id) ?? 0), 0);
      const evicted = node.blocks.filter((id) => step.gone.includes(id));
      const parts = [
        `“${words.slice(node.start, node.end).join(" ")}”`,
        `${node.blocks.length === 1 ? "block" : "blocks"} ${listed(node.blocks)}`,
        pinned.length ? `pinned: ${listed(pinned)}` : "evictable",
        lit ? `${many(lit, "word")} matched` : "",
        evicted.length ? `evicted now: ${listed(evicted)}` : "",
        `${many(node.hits, "hit")}, last used by request ${node.used + 1}`,
      ];
      put(item, "span", {}, parts.filter(Boolean).join("; "));
    });
  }

  // -- the prompt ---------------------------------------------------------------------------------------------

  const SAYS = {
    start: "", type: "is being typed", match: "sent", allocate: "takes blocks", compute: "is computed",
    insert: "in the tree", answer: "answered", keep: "answer in the tree", release: "ended",
  };

  function drawPrompt(values, step) {
    const line = at("prompt");
    line.replaceChildren();
    const {words, prompt} = step.request < 0 ? {words: [], prompt: 0} : wordsOf(values.example, step.request);
    const total = recording.examples[values.example].prompts.length;
    at("who").textContent = step.request < 0 ? "Nothing typed yet" : `Request ${step.request + 1} of ${total}`;
    at("doing").textContent = SAYS[recording.acts[step.act]];
    at("hit").textContent = step.request < 0 ? "" : `${step.hit} of ${Math.min(step.typed, prompt)} tokens cached`;
    let group = null;
    for (let i = 0; i < step.typed; i++) {
      if (i % SIZE === 0) group = put(line, "span", {class: "rkt-group"});
      const kind = i < step.hit ? "hit" : i < prompt ? "new" : "answer";
      const word = put(group, kind === "hit" ? "mark" : "span", {class: `rkt-token rkt-token--${kind}`}, words[i]);
      if (i === step.typed - 1 && step.act === ACT.type) word.classList.add("rkt-token--last");
      group.append(" ");
    }
    if (step.act === ACT.type || step.act === ACT.start) put(line, "span", {class: "rkt-caret", "aria-hidden": "true"});
  }

  // -- the pool -----------------------------------------------------------------------------------------------

  function drawPool(step) {
    const {nodes, refs, running} = step.state;
    const filled = new Map();
    const cached = new Set();
    for (const {table, computed, request} of running) {
      table.forEach((id, i) => filled.set(id, {rows: Math.max(0, Math.min(SIZE, computed - i * SIZE)), request}));
    }
    for (const node of nodes) {
      node.blocks.forEach((id, i) => {
        cached.add(id);
        filled.set(id, {rows: Math.min(SIZE, node.end - node.start - i * SIZE)});
      });
    }
    const strip = at("pool");
    strip.replaceChildren();
    refs.forEach((count, id) => {
      const {rows = 0, request = null} = filled.get(id) ?? {};
      const [kind, said] = count === 0 ? ["free", "free"]
        : !cached.has(id) ? ["own", `of request ${request + 1}, not in the tree`]
        : count > 1 ? ["pinned", `cached and pinned, ${count} references`]
        : ["cached", "cached, evictable"];
      const sign = step.gone.includes(id) ? "×" : step.added.includes(id) ? "+" : "";
      const label = `Block ${id}: ${said}${count ? `, ${rows} of ${SIZE} rows filled` : ""}` +
        (sign === "×" ? "; evicted or replaced just now" : sign === "+" ? "; new in the tree" : "");
      const cell = put(strip, "li", {class: `rkt-cell rkt-cell--${kind}`, "data-block": id, title: label});
      put(cell, "span", {class: "rk-hidden"}, label);
      put(cell, "span", {"aria-hidden": "true", class: "rkt-cell-id"}, id);
      if (kind === "own") put(cell, "span", {"aria-hidden": "true", class: "rkt-cell-who"}, `r${request + 1}`);
      if (sign) put(cell, "span", {"aria-hidden": "true", class: `rkt-cell-sign rkt-cell-sign--${sign === "+" ? "added" : "gone"}`}, sign);
      const level = put(cell, "span", {"aria-hidden": "true", class: "rkt-level"});
      for (let i = 0; i < SIZE; i++) put(level, "i", {class: i < rows ? "rkt-full" : null});
    });
    at("pool-size").textContent = `${refs.length} blocks of ${SIZE} tokens`;
  }

  function drawRunning(step) {
    const list = at("running");
    list.replaceChildren();
    if (!step.state.running.length) put(list, "li", {class: "rkt-none"}, "No request holds a block.");
    for (const {request, table, tail} of step.state.running) {
      const item = put(list, "li");
      put(item, "b", {}, `Request ${request + 1}: `);
      item.append(table.length ? table.join(" ") : tail.length ? "" : "nothing yet");
      if (tail.length) item.append(`${table.length ? " + " : ""}${many(tail[1], "row")} of ${tail[0]}`);
    }
  }

  function drawCounters(step, steps, number, still) {
    for (const cell of root.querySelectorAll("[data-counter]")) {
      const value = String(step.state.counters[cell.dataset.counter]);
      cell.classList.toggle("rkt-changed", !still && cell.textContent !== value);
      cell.textContent = value;
    }
    at("sent").textContent = steps.slice(0, number + 1).filter(({act}) => act === ACT.match).length;
    const {hit_tokens: hit, computed_tokens: computed} = step.state.counters;
    const sum = hit + computed;
    at("share").style.setProperty("--share", sum ? hit / sum : 0);
    at("share-text").textContent = sum ? `${Math.round((100 * hit) / sum)}% of ${sum} prompt tokens hit` : "No prompt tokens yet";
  }

  // -- the events ---------------------------------------------------------------------------------------------

  let listedRun = "", eventItems = [];
  function listEvents(values, steps) {
    const key = keyOf(values);
    if (key === listedRun) return;
    listedRun = key;
    const list = at("events");
    list.replaceChildren();
    eventItems = [];
    let request = -1;
    steps.forEach((step, number) => {
      const first = step.act === ACT.type && step.request !== request;
      if (step.act === ACT.type && !first) return;
      if (first) request = step.request;
      const evicts = step.gone.length > 0 && step.act !== ACT.insert && step.act !== ACT.keep;
      const item = put(list, "li", {class: first ? "rkt-event rkt-event--first" : "rkt-event"});
      const button = put(item, "button", {type: "button", "data-step": number,
        class: evicts ? "rkt-evicts" : step.split.length ? "rkt-splits" : null});
      const {words, prompt} = first ? wordsOf(values.example, request) : {words: [], prompt: 0};
      button.textContent = first ? `Request ${request + 1} is typed: … ${words.slice(Math.max(0, prompt - 3), prompt).join(" ")}` : step.text;
      button.addEventListener("click", () => player.go(number));
      eventItems.push([number, button]);
    });
  }

  function markEvent(number) {
    let current = null;
    for (const [step, button] of eventItems) {
      button.classList.toggle("rkt-ahead", step > number);
      if (step <= number) current = button;
    }
    if (!current || current.hasAttribute("aria-current")) return;
    at("events").querySelector("[aria-current]")?.removeAttribute("aria-current");
    current.setAttribute("aria-current", "step");
    // Only the list scrolls, never the page.
    const box = at("events");
    const top = current.offsetTop;
    if (top < box.scrollTop || top + current.offsetHeight > box.scrollTop + box.clientHeight) {
      box.scrollTop = top - box.clientHeight / 2 + current.offsetHeight / 2;
    }
  }

  // -- all together -------------------------------------------------------------------------------------------

  let before = {key: "", step: 0};
  function draw(values, number) {
    const steps = runOf(keyOf(values));
    const step = steps[number];
    const still = before.key !== keyOf(values) || Math.abs(before.step - number) > 1;
    before = {key: keyOf(values), step: number};
    drawPrompt(values, step);
    const nodes = drawTree(values, steps, number, still);
    listTree(values, nodes, step, shownNodes(steps, number).refs);
    drawPool(step);
    drawRunning(step);
    drawCounters(step, steps, number, still);
    at("event").textContent = step.text;
    listEvents(values, steps);
    markEvent(number);
    root.dataset.step = number;
    root.dataset.act = recording.acts[step.act];
  }

  const examples = Object.entries(recording.examples).map(([name, {label}]) => [name, label]);
  const policies = Object.entries(recording.policies);
  const player = window.radixkvPlayer(root, {
    options: [
      {name: "example", label: "Example", kind: "radio", value: "few-shot", choices: examples, restarts: true},
      {name: "pool", label: "Pool", kind: "range", min: LEAST, max: MOST, value: 12, text: (n) => `${n} blocks`},
      {name: "policy", label: "Evict", kind: "radio", value: "lru", choices: policies},
    ],
    numSteps: (values) => runOf(keyOf(values)).length,
    draw,
    live: at("event"),
    marks: (values) => runOf(keyOf(values)).flatMap((step, number) => {
      if (step.act === ACT.match) return [{step: number, label: `request ${step.request + 1} is sent`, kind: "send"}];
      const evicts = step.gone.length && (step.act === ACT.allocate || step.act === ACT.answer);
      return evicts ? [{step: number, label: "eviction", kind: "evict"}] : [];
    }),
    speed: 4,
  });

  const next = document.createElement("button");
  next.type = "button";
  next.className = "rk-button rkt-next";
  next.textContent = "Next prompt";
  next.title = "To the moment when the next prompt is sent";
  next.addEventListener("click", () => {
    const steps = runOf(keyOf(player.values));
    const found = steps.findIndex((step, i) => i > player.step && step.act === ACT.match);
    player.go(found < 0 ? steps.length - 1 : found);
  });
  root.querySelector(".rk-buttons").append(next);

  // A block in the pool and in the tree are the same: each shows the other.
  function point(event) {
    const id = event.type === "pointerleave" ? null : event.target.closest?.("[data-block]")?.dataset.block ?? null;
    for (const shape of root.querySelectorAll("[data-block]")) {
      shape.classList.toggle("rkt-pointed", id !== null && shape.dataset.block === id);
    }
  }
  for (const part of [panel, at("pool")]) {
    part.addEventListener("pointerover", point);
    part.addEventListener("pointerleave", point);
  }

  new ResizeObserver(() => {
    if (panel.clientWidth === wide) return;
    wide = panel.clientWidth;
    before.key = "";
    player.redraw();
  }).observe(panel);
})();
