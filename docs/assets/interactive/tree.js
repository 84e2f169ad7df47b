/* The page "The radix tree": draws what docs/tooling/scenes/tree.py recorded from RadixTree and BlockPool.
 *
 * Where a box stands is decided here; what is in it, what is cached, pinned or evicted is read from the recording.
 */
"use strict";

(() => {
  const {Player, EventList, element, count, listed, kept} = window.radixkv;
  const root = document.getElementById("rk-tree");
  const recording = window.radixkvTree;
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
  const sequences = kept((example) => kept((request) => {
    const [prompt, answer] = recording.examples[example].prompts[request];
    return {words: [...prompt, ...answer].map((i) => recording.words[i]), prompt: prompt.length};
  }));
  const wordsOf = (example, request) => sequences(example)(request);

  // -- where the boxes stand ----------------------------------------------------------------------------------

  const ROW = 21, HEIGHT = ROW - 3, CAPTION = 15; // of a block: with and without the gap below; of what stands above a node
  const BADGE = 33, SIGN = 14, SLOT = 45, ROOMY = 60; // width of a block's number, its sign, and a word: at least, at most
  const GAP = 28, APART = 9, TOP = 6; // between a node and its children, between siblings, above all
  const NARROW = 560; // below this, children stand under their parent

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

  const layoutOf = (nodes, slot, room) => (room < NARROW ? downLayout(nodes, slot, room) : acrossLayout(nodes, slot));

  /** Blocks that leave the tree for want of room; on insertion others take their place. */
  const evicts = (step) => step.gone.length > 0 && (step.act === ACT.allocate || step.act === ACT.answer);
  /** The state that a step shows: an eviction is shown on the tree that it is taken from. */
  const shownState = (steps, number) => (evicts(steps[number]) ? steps[number - 1] : steps[number]).state;
  /** How many rows of each block are matched. */
  const hitRowsOf = (step) => new Map(step.path.map((id, i) => [id, Math.min(SIZE, step.hit - i * SIZE)]));

  /** Width of a word, and height of the drawing, for all steps of a run: the page stands still while it plays. */
  function fitOf(steps, room) {
    const trees = [...new Set(steps.map((_, i) => shownState(steps, i)))].map(({nodes}) => nodes);
    const deepest = Math.max(...trees.flatMap(depthsOf));
    const fixed = BADGE + SIGN;
    const slot = room < NARROW
      ? Math.floor((room - 12 - 14 * deepest - fixed) / SIZE)
      : Math.floor(((room - 30 + GAP) / (deepest + 1) - GAP - fixed) / SIZE);
    const used = Math.max(room < NARROW ? 0 : SLOT, Math.min(slot, ROOMY));
    return {slot: used, height: Math.max(...trees.map((nodes) => layoutOf(nodes, used, room).height))};
  }
  const fits = kept((steps) => kept((room) => fitOf(steps, room)));

  // -- the tree -----------------------------------------------------------------------------------------------

  const SVG = "http://www.w3.org/2000/svg";
  /** A shape or text, put into another one. */
  function put(parent, tag, attributes = {}, text = null) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== null) made.textContent = text;
    parent.append(made);
    return made;
  }

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

  function drawBlock(group, block) {
    const {id, words, pinned, mark, width, slot} = block;
    group.replaceChildren();
    group.setAttribute("class", ["rkt-block", pinned && "rkt-block--pinned", mark && `rkt-block--${mark}`]
      .filter(Boolean).join(" "));
    group.dataset.block = id;
    put(group, "rect", {class: "rkt-row", width: width - SIGN, height: HEIGHT, rx: 3});
    put(group, "rect", {class: "rkt-badge", width: BADGE - 3, height: HEIGHT, rx: 3});
    if (pinned) put(group, "path", {class: "rkt-lock", d: LOCK, transform: `translate(7.5 ${HEIGHT / 2 - 1.5})`});
    put(group, "text", {class: "rkt-id", x: pinned ? 21.5 : (BADGE - 3) / 2, y: HEIGHT / 2 + 4}, id);
    for (let i = 0; i < SIZE; i++) {
      const x = BADGE + i * slot;
      if (i < words.length) drawWord(group, block, i, x);
      else put(group, "rect", {class: "rkt-empty", x: x + 1.5, y: 2.5, width: slot - 4, height: HEIGHT - 5, rx: 2});
    }
    if (mark === "gone") {
      put(group, "rect", {class: "rkt-crossed", width: width - SIGN, height: HEIGHT, rx: 3});
      put(group, "line", {class: "rkt-strike", x1: BADGE, x2: width - SIGN, y1: HEIGHT / 2, y2: HEIGHT / 2});
    }
    if (mark) {
      put(group, "text", {class: "rkt-sign", x: width - SIGN / 2 + 1, y: HEIGHT / 2 + 5}, mark === "gone" ? "×" : "+");
    }
  }
  function drawWord(group, {words, rows, slot}, i, x) {
    const hit = i < rows;
    if (hit) {
      put(group, "rect", {class: "rkt-hit", x, y: 1, width: slot - 1, height: HEIGHT - 2, rx: 2});
      put(group, "rect", {class: "rkt-hitline", x: x + 2, y: HEIGHT - 3.5, width: slot - 5, height: 2});
    }
    const word = put(group, "text", {class: hit ? "rkt-word rkt-word--hit" : "rkt-word",
      x: x + slot / 2 - 0.5, y: HEIGHT / 2 + 3.5}, words[i]);
    if (widthOf(words[i]) <= slot - 3) return;
    word.setAttribute("textLength", slot - 3);
    word.setAttribute("lengthAdjust", "spacingAndGlyphs");
  }

  function drawTree(values, steps, number, still) {
    const step = steps[number];
    const {nodes, refs} = shownState(steps, number);
    const {slot, height} = fits(steps)(wide);
    const layout = layoutOf(nodes, slot, wide);
    sizeDrawing(Math.max(layout.width, wide), height);
    svg.classList.toggle("rkt-still", still);
    svg.classList.toggle("rkt-roomy", slot >= 54);
    svg.setAttribute("aria-label", nodes.length
      ? `The tree: ${count(nodes.length, "node")}. The list below says the same in words.` : "The tree is empty.");

    const hitRows = hitRowsOf(step);
    const old = {blocks: blockShapes, nodes: nodeShapes};
    blockShapes = new Map();
    nodeShapes = new Map();
    linkLayer.replaceChildren();
    litLayer.replaceChildren();
    if (!layout.down) {
      put(linkLayer, "text", {class: "rkt-root", transform: `translate(12 ${TOP + CAPTION + 26}) rotate(-90)`}, "root");
    }
    if (!nodes.length) {
      put(linkLayer, "text", {class: "rkt-nothing", x: 40, y: TOP + CAPTION + 14}, "The tree is empty.");
    }
    nodes.forEach((node, i) => {
      const lit = node.blocks.some((id) => (hitRows.get(id) ?? 0) > 0);
      drawLink(node, layout.boxes[i], layout.boxes[node.parent], lit, layout.down, step.split);
      drawNode(keep(old.nodes, nodeShapes, node.blocks[0], nodeLayer), node, layout.boxes[i], lit);
      drawBlocks(values, node, layout.boxes[i], {step, refs, hitRows, slot, old: old.blocks});
    });
    for (const left of [...old.blocks.values(), ...old.nodes.values()]) left.remove();
    // An evicted block goes here; when its id comes back, it is another block.
    for (const id of step.gone) blockShapes.get(id)?.setAttribute("data-left", "");
  }
  function sizeDrawing(width, height) {
    // Deep trees shrink a little before they scroll.
    const scale = Math.max(0.8, Math.min(1, wide / width));
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("width", width * scale);
    svg.setAttribute("height", height * scale);
    panel.style.minHeight = `${Math.max(height * scale + 2, 160)}px`;
  }
  function drawNode(shape, node, box, lit) {
    shape.style.transform = `translate(${box.x}px, ${box.y}px)`;
    shape.setAttribute("class", lit ? "rkt-node rkt-node--lit" : "rkt-node");
    shape.replaceChildren();
    put(shape, "rect", {class: "rkt-frame", x: -4, y: CAPTION - 3, width: box.width - SIGN + 8,
      height: node.blocks.length * ROW + 3, rx: 5});
    put(shape, "text", {class: "rkt-caption", x: -2, y: CAPTION - 6}, usedText(node));
  }
  function drawBlocks(values, node, box, {step, refs, hitRows, slot, old}) {
    const {words} = wordsOf(values.example, node.request);
    node.blocks.forEach((id, j) => {
      const from = node.start + j * SIZE;
      const mark = step.gone.includes(id) ? "gone" : step.added.includes(id) ? "added" : "";
      const group = keep(old, blockShapes, id, blockLayer);
      group.style.transform = `translate(${box.x}px, ${box.y + CAPTION + j * ROW}px)`;
      drawBlock(group, {id, words: words.slice(from, Math.min(node.end, from + SIZE)), rows: hitRows.get(id) ?? 0,
        pinned: refs[id] > 1, mark, width: box.width, slot});
    });
  }
  const usedText = ({hits, used}) => `${count(hits, "hit")}, last used by request ${used + 1}`;

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
  function listTree(values, steps, number) {
    const step = steps[number];
    const {nodes, refs} = shownState(steps, number);
    const hitRows = hitRowsOf(step);
    const top = element("ul");
    const items = [];
    for (const node of nodes) {
      const item = element("li", {}, element("span", {text: nodeText(values, node, step, refs, hitRows)}));
      items.push(item);
      const parent = items[node.parent];
      if (parent && !parent.querySelector("ul")) parent.append(element("ul"));
      (parent ? parent.querySelector("ul") : top).append(item);
    }
    at("list").replaceChildren(nodes.length ? top : element("p", {text: "The tree is empty."}));
  }
  function nodeText(values, node, step, refs, hitRows) {
    const {words} = wordsOf(values.example, node.request);
    const pinned = node.blocks.filter((id) => refs[id] > 1);
    const evicted = evicts(step) ? node.blocks.filter((id) => step.gone.includes(id)) : [];
    const lit = node.blocks.reduce((sum, id) => sum + (hitRows.get(id) ?? 0), 0);
    return [
      `“${words.slice(node.start, node.end).join(" ")}”`,
      `${node.blocks.length === 1 ? "block" : "blocks"} ${listed(node.blocks)}`,
      pinned.length ? `pinned: ${listed(pinned)}` : "evictable",
      lit ? `${count(lit, "word")} matched` : "",
      evicted.length ? `evicted now: ${listed(evicted)}` : "",
      usedText(node),
    ].filter(Boolean).join("; ");
  }

  // -- the prompt ---------------------------------------------------------------------------------------------

  const SAYS = {
    start: "", type: "is being typed", match: "sent", allocate: "takes blocks", compute: "is computed",
    insert: "in the tree", answer: "answered", keep: "answer in the tree", release: "ended",
  };

  function drawPrompt(values, step) {
    const {words, prompt} = step.request < 0 ? {words: [], prompt: 0} : wordsOf(values.example, step.request);
    const total = recording.examples[values.example].prompts.length;
    at("who").textContent = step.request < 0 ? "Nothing typed yet" : `Request ${step.request + 1} of ${total}`;
    at("doing").textContent = SAYS[recording.acts[step.act]];
    at("hit").textContent = step.request < 0 ? "" : `${step.hit} of ${Math.min(step.typed, prompt)} tokens cached`;
    const groups = [];
    for (let i = 0; i < step.typed; i++) {
      if (i % SIZE === 0) groups.push(element("span", {class: "rkt-group"}));
      const kind = i < step.hit ? "hit" : i < prompt ? "new" : "answer";
      groups.at(-1).append(
        element(kind === "hit" ? "mark" : "span", {class: `rkt-token rkt-token--${kind}`, text: words[i]}), " ");
    }
    const types = step.act === ACT.type || step.act === ACT.start;
    at("prompt").replaceChildren(...groups, ...(types ? [element("span", {class: "rkt-caret", "aria-hidden": "true"})] : []));
  }

  // -- the pool -----------------------------------------------------------------------------------------------

  /** Filled rows of each block that is not free, and the request that holds it outside the tree. */
  function filledOf({nodes, running}) {
    const filled = new Map();
    for (const {table, computed, request, tail} of running) {
      if (tail.length) filled.set(tail[0], {rows: tail[1], owner: request});
      table.forEach((id, i) => filled.set(id, {rows: Math.max(0, Math.min(SIZE, computed - i * SIZE)), owner: request}));
    }
    for (const node of nodes) {
      node.blocks.forEach((id, i) => filled.set(id, {rows: Math.min(SIZE, node.end - node.start - i * SIZE)}));
    }
    return filled;
  }

  function drawPool(step) {
    const {refs} = step.state;
    const filled = filledOf(step.state);
    at("pool").replaceChildren(...refs.map((references, id) => poolCell(step, id, references, filled.get(id) ?? {rows: 0})));
    at("pool-size").textContent = `${refs.length} blocks of ${SIZE} tokens`;
  }
  const SIGNS = {added: ["+", "; new in the tree"], gone: ["×", "; evicted or replaced just now"]};
  function poolCell(step, id, references, {rows, owner}) {
    const [kind, said] = references === 0 ? ["free", "free"]
      : owner !== undefined ? ["own", `of request ${owner + 1}, not in the tree`]
      : references > 1 ? ["pinned", `cached and pinned, ${references} references`]
      : ["cached", "cached, evictable"];
    const change = step.gone.includes(id) ? "gone" : step.added.includes(id) ? "added" : "";
    const label = `Block ${id}: ${said}${references ? `, ${rows} of ${SIZE} rows filled` : ""}${change ? SIGNS[change][1] : ""}`;
    const drawn = (tag, name, ...children) => element(tag, {class: name, "aria-hidden": "true"}, ...children);
    return element("li", {class: `rkt-cell rkt-cell--${kind}`, "data-block": id, title: label},
      element("span", {class: "rk-hidden", text: label}),
      drawn("span", "rkt-cell-id", String(id)),
      ...(kind === "own" ? [drawn("span", "rkt-cell-who", `r${owner + 1}`)] : []),
      ...(change ? [drawn("span", `rkt-cell-sign rkt-cell-sign--${change}`, SIGNS[change][0])] : []),
      drawn("span", "rkt-level", ...Array.from({length: SIZE}, (_, i) => element("i", {class: i < rows ? "rkt-full" : null}))));
  }

  function drawRunning({state: {running}}) {
    const items = running.map(({request, table, tail}) => {
      const parts = [table.join(" "), tail.length ? `${count(tail[1], "row")} of ${tail[0]}` : ""].filter(Boolean);
      return element("li", {}, element("b", {text: `Request ${request + 1}: `}), parts.join(" + ") || "nothing yet");
    });
    at("running").replaceChildren(...(items.length ? items : [element("li", {class: "rkt-none", text: "No request holds a block."})]));
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

  const events = new EventList(at("events"), (step) => player.go(step));

  /** All but the typing, of which only the beginning is told. */
  function eventsOf(values, steps) {
    return steps.flatMap((step, number) => {
      if (step.act !== ACT.type) {
        return [{step: number, text: step.text, kind: evicts(step) ? "evict" : step.split.length ? "split" : "plain"}];
      }
      if (steps[number - 1].act === ACT.type && steps[number - 1].request === step.request) return [];
      const {words, prompt} = wordsOf(values.example, step.request);
      const end = words.slice(Math.max(0, prompt - 3), prompt).join(" ");
      return [{step: number, text: `Request ${step.request + 1} is typed: … ${end}`, kind: "first"}];
    });
  }

  // -- all together -------------------------------------------------------------------------------------------

  let before = {key: "", step: 0};
  function draw(values, number) {
    const steps = runOf(keyOf(values));
    const step = steps[number];
    const still = before.key !== keyOf(values) || Math.abs(before.step - number) > 1;
    before = {key: keyOf(values), step: number};
    drawPrompt(values, step);
    drawTree(values, steps, number, still);
    listTree(values, steps, number);
    drawPool(step);
    drawRunning(step);
    drawCounters(step, steps, number, still);
    at("event").textContent = step.text;
    events.fill(steps, () => eventsOf(values, steps));
    events.show(number);
    root.dataset.step = number;
    root.dataset.act = recording.acts[step.act];
  }

  const examples = Object.entries(recording.examples).map(([name, {label}]) => [name, label]);
  const policies = Object.entries(recording.policies);
  const player = new Player(root, {
    options: [
      {name: "example", label: "Example", kind: "radio", value: "few-shot", choices: examples, restarts: true},
      {name: "pool", label: "Pool", kind: "range", min: LEAST, max: MOST, value: 12, text: (n) => `${n} blocks`},
      {name: "policy", label: "Evict", kind: "radio", value: "lru", choices: policies},
    ],
    numSteps: (values) => runOf(keyOf(values)).length,
    draw,
    say: (values, number) => runOf(keyOf(values))[number].text,
    marks: (values) => runOf(keyOf(values)).flatMap((step, number) => {
      if (step.act === ACT.match) return [{step: number, label: `request ${step.request + 1} is sent`, kind: "send"}];
      return evicts(step) ? [{step: number, label: "eviction", kind: "evict"}] : [];
    }),
    speed: 4,
  });

  root.querySelector(".rk-buttons").append(element("button", {
    type: "button", class: "rk-button rkt-next", title: "To the moment when the next prompt is sent", text: "Next prompt",
    onclick: () => {
      const steps = runOf(keyOf(player.values));
      const found = steps.findIndex((step, i) => i > player.step && step.act === ACT.match);
      player.go(found < 0 ? steps.length - 1 : found);
    },
  }));

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
