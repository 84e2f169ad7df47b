/* What the interactive pages have in common: a recording is stepped through, forwards and backwards.
 *
 * The player builds the controls, keeps one state (the values of the options, and the step), and calls `draw` with it.
 * What is drawn was recorded from the library when the site was built; nothing here decides anything.
 *
 *   const player = radixkvPlayer(root, {
 *     options: [                                    // what a reader may choose; each has a name, a label and a value
 *       {name: "pool", label: "Pool", kind: "range", min: 10, max: 40, value: 28, text: (n) => `${n} blocks`},
 *       {name: "mode", label: "Preemption", kind: "radio", value: "swap", choices: [["swap", "Swap"], ["drop", "Drop"]]},
 *       {name: "scene", label: "Example", kind: "select", value: "chat", choices: [["chat", "A chat"]]},
 *       {name: "keep", label: "Keep cached", kind: "check", value: true},
 *     ],                                            // `restarts: true` in one: back to step 0 when it is changed
 *     numSteps: (values) => 61,                     // how many states there are: steps 0 to 60
 *     draw: (values, step) => {},                   // draw this state; called once at the start, and at each change
 *     marks: (values) => [{step: 7, label: "request 2 joins", kind: "join"}],    // optional: seen below the slider
 *     live: element,                                // optional: read aloud when it changes, except while playing
 *     speeds: [0.5, 1, 2, 4, 8], speed: 2,          // optional: steps a second
 *   });
 *
 * `root` holds two empty elements: `[data-player="controls"]` (buttons, slider, speed) and `[data-player="options"]`. Both
 * get classes that `interactive.css` styles. The player has
 *
 *   player.values, player.step                      // read only
 *   player.go(step)                                 // stops playing; clamped
 *   player.set({pool: 20}, step)                    // options, and perhaps the step, at once; keeps the step if it exists
 *   player.play(), player.pause(), player.playing
 *   player.redraw()
 *
 * Keys: arrow left and right, Home, End, space. They work on the whole page, except where the focus is on something that
 * uses them itself. A key that a page has handled (`preventDefault`) is left alone.
 *
 * The state is in the address, `#pool=28&mode=swap&keep=1&step=17`, so that a moment can be shared and a link can set one:
 * what a link does not name has its first value, what makes no sense is mended. The address is replaced, so the browser's
 * back button leaves the page as it would any other. Nothing is stored.
 */
"use strict";

(() => {
  const ICONS = {
    reset: "M5 5h2.4v14H5zM19 5v14L8.6 12z",
    back: "M16 5v14L6 12zM16.6 5H19v14h-2.4z",
    play: "M7 4.5v15l12.5-7.5z",
    pause: "M6 5h4.2v14H6zM13.8 5H18v14h-4.2z",
    step: "M8 5v14l10-7zM5 5h2.4v14H5z",
  };

  /** An element with attributes and children; `text` and `on...` are what they say. */
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "text") made.textContent = value;
      else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value === true) made.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  function icon(name) {
    const holder = element("span", {class: "rk-icon", "aria-hidden": "true"});
    holder.innerHTML = `<svg viewBox="0 0 24 24"><path d="${ICONS[name]}"/></svg>`;
    return holder;
  }

  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  // -- options: how each kind is drawn, read from the address and written to it --------------------------------

  const KINDS = {
    range: {
      build(option, change) {
        const {min, max, step = 1} = option;
        const input = element("input", {
          type: "range", min, max, step, autocomplete: "off", id: `rk-${option.name}`, name: option.name,
          oninput: () => change(Number(input.value)),
        });
        const shown = element("output", {class: "rk-value", for: input.id});
        const show = (value) => {
          input.value = value;
          shown.textContent = option.text ? option.text(value) : String(value);
          input.setAttribute("aria-valuetext", shown.textContent);
        };
        const label = element("label", {class: "rk-label", for: input.id, text: option.label});
        return [element("div", {class: "rk-option rk-option--range"}, label, input, shown), show];
      },
      write: String,
      read(option, text) {
        const {min, max, step = 1} = option;
        const value = Number(text);
        if (text.trim() === "" || !Number.isFinite(value)) return option.value;
        return clamp(min + Math.round((value - min) / step) * step, min, max);
      },
    },
    radio: {
      build(option, change) {
        const inputs = new Map();
        const choices = option.choices.map(([value, text]) => {
          const input = element("input", {
            type: "radio", name: `rk-${option.name}`, value, autocomplete: "off", onchange: () => change(value),
          });
          inputs.set(value, input);
          return element("label", {class: "rk-choice"}, input, element("span", {text}));
        });
        const legend = element("legend", {class: "rk-label", text: option.label});
        const set = element("fieldset", {class: "rk-option rk-option--radio"}, legend,
          element("span", {class: "rk-choices"}, ...choices));
        return [set, (value) => { inputs.get(value).checked = true; }];
      },
      write: String,
      read: (option, text) => (option.choices.some(([value]) => value === text) ? text : option.value),
    },
    select: {
      build(option, change) {
        const choices = option.choices.map(([value, text]) => element("option", {value, text}));
        const input = element("select", {
          id: `rk-${option.name}`, autocomplete: "off", onchange: () => change(input.value),
        }, ...choices);
        const label = element("label", {class: "rk-label", for: input.id, text: option.label});
        return [element("div", {class: "rk-option rk-option--select"}, label, input),
          (value) => { input.value = value; }];
      },
      write: String,
      read: (option, text) => KINDS.radio.read(option, text),
    },
    check: {
      build(option, change) {
        const input = element("input", {type: "checkbox", autocomplete: "off", onchange: () => change(input.checked)});
        const label = element("label", {class: "rk-option rk-option--check"}, input, element("span", {text: option.label}));
        return [label, (value) => { input.checked = value; }];
      },
      write: (value) => (value ? "1" : "0"),
      read: (option, text) => (/^[01]$/.test(text) ? text === "1" : option.value),
    },
  };

  // -- which keys are somebody else's --------------------------------------------------------------------------

  const ARROWS = new Set(["ArrowLeft", "ArrowRight"]);
  const USES_ALL = "textarea, select, [contenteditable], [role=textbox], [role=listbox]";
  const USES_SPACE = "button, summary, [role=button], input[type=checkbox], input[type=radio]";

  function usesKey(focused, key) {
    if (focused.closest(USES_ALL)) return true;
    const input = focused.closest("input");
    if (input && !["range", "checkbox", "radio"].includes(input.type)) return true;
    if (key === " ") return Boolean(focused.closest(USES_SPACE));
    if (!input) return false;
    return input.type === "range" || (input.type === "radio" && ARROWS.has(key));
  }

  // -- the player ----------------------------------------------------------------------------------------------

  window.radixkvPlayer = (root, spec) => {
    const {options, draw, numSteps} = spec;
    const speeds = spec.speeds ?? [0.5, 1, 2, 4, 8];
    const first = Object.fromEntries(options.map(({name, value}) => [name, value]));
    const state = {values: {...first}, step: 0, speed: spec.speed ?? 2, timer: 0, writing: 0, written: null};

    const last = () => numSteps(state.values) - 1;
    const playing = () => state.timer !== 0;

    // Buttons, position and speed.
    const button = (name, text, title, onclick) =>
      element("button", {type: "button", class: `rk-button rk-button--${name}`, title, onclick},
        icon(name), element("span", {text}));
    const buttons = {
      reset: button("reset", "Reset", "Back to the start (Home)", () => player.go(0)),
      back: button("back", "Back", "One step back (arrow left)", () => player.go(state.step - 1)),
      play: button("play", "Play", "Play or pause (space)", () => toggle()),
      step: button("step", "Step", "One step on (arrow right)", () => player.go(state.step + 1)),
    };
    const position = element("input", {
      type: "range", min: 0, step: 1, class: "rk-position", "aria-label": "Position", autocomplete: "off",
      oninput: () => player.go(Number(position.value)),
    });
    const marks = element("div", {class: "rk-marks", "aria-hidden": "true"});
    const where = element("output", {class: "rk-where", "aria-label": "Step", "aria-live": "off"}); // `live` is what is read
    const speed = element("select", {
      "aria-label": "Speed", class: "rk-speed", autocomplete: "off", onchange: () => {
        state.speed = Number(speed.value);
        if (playing()) wait();
      },
    }, ...speeds.map((value) => element("option", {value, text: `${value} step${value === 1 ? "" : "s"}/s`})));
    speed.value = state.speed;

    const controls = root.querySelector('[data-player="controls"]');
    controls.classList.add("rk-controls");
    controls.setAttribute("role", "group");
    controls.setAttribute("aria-label", "Playing");
    controls.append(
      element("div", {class: "rk-buttons"}, buttons.reset, buttons.back, buttons.play, buttons.step),
      element("div", {class: "rk-track"}, position, marks),
      where,
      speed,
    );

    // Options.
    const shown = {};
    const optionsHere = root.querySelector('[data-player="options"]');
    optionsHere.classList.add("rk-options");
    optionsHere.setAttribute("role", "group");
    optionsHere.setAttribute("aria-label", "What to play");
    for (const option of options) {
      const [built, show] = KINDS[option.kind].build(option, (value) => player.set({[option.name]: value}, option.restarts ? 0 : state.step));
      built.dataset.option = option.name;
      shown[option.name] = show;
      optionsHere.append(built);
    }

    function show() {
      const end = last();
      state.step = clamp(state.step, 0, end);
      for (const {name} of options) shown[name](state.values[name]);
      position.max = end;
      position.value = state.step;
      where.textContent = `${state.step} / ${end}`;
      // Not `disabled`: a disabled button loses the focus, and a reader who uses the keyboard their place.
      for (const name of ["reset", "back"]) buttons[name].setAttribute("aria-disabled", String(state.step === 0));
      buttons.step.setAttribute("aria-disabled", String(state.step === end));
      draw({...state.values}, state.step);
      position.setAttribute("aria-valuetext", `step ${state.step} of ${end}`);
      showMarks(end);
    }

    let marked = null;
    function showMarks(end) {
      const key = JSON.stringify(state.values);
      if (!spec.marks || key === marked) return;
      marked = key;
      marks.replaceChildren(...spec.marks(state.values).map(({step, label, kind}) => {
        const mark = element("span", {class: `rk-mark rk-mark--${kind}`, title: `${step}: ${label}`});
        mark.style.setProperty("--at", end ? step / end : 0);
        return mark;
      }));
    }

    function showPlaying() {
      const [name, text] = playing() ? ["pause", "Pause"] : ["play", "Play"];
      buttons.play.replaceChildren(icon(name), element("span", {text}));
      buttons.play.classList.toggle("rk-button--playing", playing());
      if (spec.live) spec.live.setAttribute("aria-live", playing() ? "off" : "polite");
    }

    function moveTo(step) {
      state.step = clamp(Math.round(step), 0, last());
      show();
      write();
    }

    // Playing.
    function wait() {
      clearTimeout(state.timer);
      state.timer = setTimeout(tick, 1000 / state.speed);
    }
    function tick() {
      moveTo(state.step + 1);
      if (state.step < last()) wait();
      else player.pause();
    }
    const toggle = () => (playing() ? player.pause() : player.play());

    // The address. Browsers limit how often it may be replaced, so a slider that is dragged writes it once.
    function write() {
      clearTimeout(state.writing);
      state.writing = setTimeout(() => {
        const parts = options.map((option) =>
          `${option.name}=${encodeURIComponent(KINDS[option.kind].write(state.values[option.name]))}`);
        state.written = `#${[...parts, `step=${state.step}`].join("&")}`;
        history.replaceState(history.state, "", state.written);
      }, 120);
    }
    /** Take the state that the address names; whether it names one. */
    function read() {
      const given = new URLSearchParams(location.hash.slice(1));
      const known = [...options.map(({name}) => name), "step"];
      if (!known.some((name) => given.has(name))) return false; // a heading, or nothing
      for (const option of options) {
        const text = given.get(option.name);
        state.values[option.name] = text === null ? option.value : KINDS[option.kind].read(option, text);
      }
      const step = Number(given.get("step") ?? 0);
      state.step = Number.isFinite(step) ? Math.round(step) : 0;
      return true;
    }
    addEventListener("hashchange", () => {
      if (location.hash === state.written || !read()) return;
      player.pause();
      clearTimeout(state.writing);
      show();
    });

    // Keys.
    const KEYS = {
      ArrowLeft: () => player.go(state.step - 1),
      ArrowRight: () => player.go(state.step + 1),
      Home: () => player.go(0),
      End: () => player.go(last()),
      " ": () => toggle(),
    };
    function isSeen() {
      const {top, bottom} = root.getBoundingClientRect();
      return bottom > 0 && top < innerHeight;
    }
    document.addEventListener("keydown", (event) => {
      const {key, target} = event;
      if (!(key in KEYS) || event.defaultPrevented || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
      const inside = root.contains(target);
      // Elsewhere on the page these three scroll it.
      if (!inside && (key === "Home" || key === "End" || (key === " " && !isSeen()))) return;
      if (usesKey(target, key)) return;
      event.preventDefault();
      KEYS[key]();
    });
    // Nobody watches.
    document.addEventListener("visibilitychange", () => { if (document.hidden) player.pause(); });

    const player = {
      get values() { return {...state.values}; },
      get step() { return state.step; },
      get playing() { return playing(); },
      go(step) {
        player.pause();
        moveTo(step);
      },
      set(values, step = state.step) {
        Object.assign(state.values, values);
        moveTo(step);
      },
      play() {
        if (playing()) return;
        if (state.step === last()) moveTo(0);
        wait();
        showPlaying();
      },
      pause() {
        clearTimeout(state.timer);
        state.timer = 0;
        showPlaying();
      },
      redraw: () => show(),
    };
    if (spec.live) spec.live.setAttribute("aria-atomic", "true");
    read();
    showPlaying();
    show();
    return player;
  };
})();
