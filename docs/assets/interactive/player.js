/* What the interactive pages have in common: a recording is stepped through, forwards and backwards.
 *
 * The player builds the controls, keeps one state (the values of the options, and the step), and calls `draw` with it.
 * What is drawn was recorded from the library when the site was built; nothing here decides anything.
 *
 *   const player = new radixkv.Player(root, {
 *     options: [                                    // what a reader may choose; each has a name, a label and a value
 *       {name: "pool", label: "Pool", kind: "range", min: 10, max: 40, value: 28, text: (n) => `${n} blocks`},
 *       {name: "mode", label: "Preemption", kind: "radio", value: "swap", choices: [["swap", "Swap"], ["drop", "Drop"]]},
 *       {name: "keep", label: "Keep cached", kind: "check", value: true},
 *     ],                                            // `restarts: true` in one: back to step 0 when it is changed
 *     numSteps: (values) => 61,                     // how many states there are: steps 0 to 60
 *     draw: (values, step) => {},                   // draw this state; called once at the start, and at each change
 *     say: (values, step) => "Request 2 joins.",    // what a screen reader says of it, except while playing
 *     marks: (values) => [{step: 7, label: "request 2 joins", kind: "join"}],    // optional: seen below the slider
 *     speed: 2,                                     // optional: steps a second at first
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
 *
 * There is also `radixkv.EventList`, and what is small: `element`, `count`, `listed`, `kept`.
 */
"use strict";

window.radixkv = (() => {
  // -- small things --------------------------------------------------------------------------------------------

  /** An HTML element with attributes and children; `text` and `on...` are what they say. */
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

  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  /** `1 block`, `2 blocks`. */
  const count = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
  /** `3`, `3 and 5`, `3, 5 and 7`. */
  const listed = (items) => (items.length > 1 ? `${items.slice(0, -1).join(", ")} and ${items.at(-1)}` : String(items[0]));
  /** A function of one argument that makes each of its results once. */
  function kept(make) {
    const made = new Map();
    return (key) => {
      if (!made.has(key)) made.set(key, make(key));
      return made.get(key);
    };
  }

  const ICONS = {
    reset: "M5 5h2.4v14H5zM19 5v14L8.6 12z",
    back: "M16 5v14L6 12zM16.6 5H19v14h-2.4z",
    play: "M7 4.5v15l12.5-7.5z",
    pause: "M6 5h4.2v14H6zM13.8 5H18v14h-4.2z",
    step: "M8 5v14l10-7zM5 5h2.4v14H5z",
  };
  function icon(name) {
    const holder = element("span", {class: "rk-icon", "aria-hidden": "true"});
    holder.innerHTML = `<svg viewBox="0 0 24 24"><path d="${ICONS[name]}"/></svg>`;
    return holder;
  }

  // -- options: how each kind is drawn, read from the address and written to it --------------------------------

  const KINDS = {
    range: {
      build(option, change) {
        const {min, max} = option;
        const input = element("input", {
          type: "range", min, max, autocomplete: "off", id: `rk-${option.name}`, oninput: () => change(Number(input.value)),
        });
        const shown = element("span", {class: "rk-value"}); // the slider says it: aria-valuetext
        const show = (value) => {
          input.value = value;
          shown.textContent = option.text(value);
          input.setAttribute("aria-valuetext", shown.textContent);
        };
        const label = element("label", {class: "rk-label", for: input.id, text: option.label});
        return [element("div", {class: "rk-option rk-option--range"}, label, input, shown), show];
      },
      write: String,
      read({min, max, value}, text) {
        const given = Number(text);
        return text.trim() === "" || !Number.isFinite(given) ? value : clamp(Math.round(given), min, max);
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
    if (input) return input.type === "range" || (input.type === "radio" && ARROWS.has(key));
    return ARROWS.has(key) && scrollsSideways(focused);
  }
  const scrollsSideways = (box) => box !== document.body && box.scrollWidth > box.clientWidth + 1 &&
    /auto|scroll/.test(getComputedStyle(box).overflowX);

  // -- the player ----------------------------------------------------------------------------------------------

  const SPEEDS = [0.5, 1, 2, 4, 8];

  class Player {
    #root;
    #spec;
    #values;
    #step = 0;
    #speed;
    #timers = {play: 0, write: 0, say: 0};
    #marked = "";
    #address; // as we know it
    #parts;
    #options; // how each option is shown, by name

    constructor(root, spec) {
      this.#root = root;
      this.#spec = spec;
      this.#values = Object.fromEntries(spec.options.map(({name, value}) => [name, value]));
      this.#speed = spec.speed ?? 2;
      this.#parts = this.#buildControls(root.querySelector('[data-player="controls"]'));
      this.#options = this.#buildOptions(root.querySelector('[data-player="options"]'));
      addEventListener("hashchange", () => this.#takeAddress());
      document.addEventListener("keydown", (event) => this.#press(event));
      // Nobody watches.
      document.addEventListener("visibilitychange", () => { if (document.hidden) this.pause(); });
      this.#readAddress();
      this.#showPlaying();
      this.redraw();
    }

    get values() { return {...this.#values}; }
    get step() { return this.#step; }
    get playing() { return this.#timers.play !== 0; }
    get #last() { return this.#spec.numSteps(this.#values) - 1; }

    go(step) {
      this.pause();
      this.#moveTo(step);
    }

    set(values, step = this.#step) {
      Object.assign(this.#values, values);
      this.#moveTo(step);
    }

    play() {
      if (this.playing) return;
      if (this.#step === this.#last) this.#moveTo(0);
      this.#wait();
      this.#showPlaying();
    }

    pause() {
      if (!this.playing) return;
      clearTimeout(this.#timers.play);
      this.#timers.play = 0;
      this.#showPlaying();
      this.#tell();
    }

    redraw() {
      const {reset, back, step, position, where} = this.#parts;
      const last = this.#last;
      this.#step = clamp(this.#step, 0, last);
      for (const {name} of this.#spec.options) this.#options[name](this.#values[name]);
      position.max = last;
      position.value = this.#step;
      position.setAttribute("aria-valuetext", `step ${this.#step} of ${last}`);
      where.textContent = `${this.#step} / ${last}`;
      // Not `disabled`: a disabled button loses the focus, and a reader who uses the keyboard their place.
      for (const button of [reset, back]) button.setAttribute("aria-disabled", String(this.#step === 0));
      step.setAttribute("aria-disabled", String(this.#step === last));
      this.#showMarks(last);
      this.#spec.draw(this.values, this.#step);
    }

    #moveTo(step) {
      this.#step = clamp(Math.round(step), 0, this.#last);
      this.redraw();
      this.#tell();
    }

    /** The address and the screen reader are told where we are. */
    #tell() {
      this.#writeAddress();
      this.#say();
    }

    // Playing.
    #wait() {
      clearTimeout(this.#timers.play);
      this.#timers.play = setTimeout(() => {
        this.#moveTo(this.#step + 1);
        if (this.#step < this.#last) this.#wait();
        else this.pause();
      }, 1000 / this.#speed);
    }
    #toggle() {
      if (this.playing) this.pause();
      else this.play();
    }
    #showPlaying() {
      const [name, text] = this.playing ? ["pause", "Pause"] : ["play", "Play"];
      this.#parts.play.replaceChildren(icon(name), element("span", {text}));
    }

    // What is built.
    #buildControls(controls) {
      const button = (name, text, title, onclick) =>
        element("button", {type: "button", class: `rk-button rk-button--${name}`, title, onclick},
          icon(name), element("span", {text}));
      const parts = {
        reset: button("reset", "Reset", "Back to the start (Home)", () => this.go(0)),
        back: button("back", "Back", "One step back (arrow left)", () => this.go(this.#step - 1)),
        play: button("play", "Play", "Play or pause (space)", () => this.#toggle()),
        step: button("step", "Step", "One step on (arrow right)", () => this.go(this.#step + 1)),
        position: element("input", {
          type: "range", min: 0, class: "rk-position", "aria-label": "Position", autocomplete: "off",
          oninput: () => this.go(Number(parts.position.value)),
        }),
        marks: element("div", {class: "rk-marks", "aria-hidden": "true"}),
        where: element("span", {class: "rk-where"}),
        said: element("p", {class: "rk-said rk-hidden", role: "status"}),
      };
      controls.classList.add("rk-controls");
      controls.setAttribute("role", "group");
      controls.setAttribute("aria-label", "Playing");
      controls.append(
        element("div", {class: "rk-buttons"}, parts.reset, parts.back, parts.play, parts.step),
        element("div", {class: "rk-track"}, parts.position, parts.marks),
        parts.where,
        this.#buildSpeed(),
        parts.said,
      );
      return parts;
    }
    #buildSpeed() {
      const choices = SPEEDS.map((value) => element("option", {value, text: `${value} step${value === 1 ? "" : "s"}/s`}));
      const select = element("select", {"aria-label": "Speed", class: "rk-speed", autocomplete: "off"}, ...choices);
      select.value = this.#speed;
      select.addEventListener("change", () => {
        this.#speed = Number(select.value);
        if (this.playing) this.#wait();
      });
      return select;
    }
    #buildOptions(holder) {
      holder.classList.add("rk-options");
      holder.setAttribute("role", "group");
      holder.setAttribute("aria-label", "What to play");
      const shows = {};
      for (const option of this.#spec.options) {
        const change = (value) => this.set({[option.name]: value}, option.restarts ? 0 : this.#step);
        const [built, show] = KINDS[option.kind].build(option, change);
        shows[option.name] = show;
        holder.append(built);
      }
      return shows;
    }
    #showMarks(last) {
      const key = JSON.stringify(this.#values);
      if (!this.#spec.marks || key === this.#marked) return;
      this.#marked = key;
      this.#parts.marks.replaceChildren(...this.#spec.marks(this.values).map(({step, label, kind}) => {
        const mark = element("span", {class: `rk-mark rk-mark--${kind}`, title: `${step}: ${label}`});
        mark.style.setProperty("--at", last ? step / last : 0);
        return mark;
      }));
    }

    // What is read aloud: the last of several steps in a row, and none while playing.
    #say() {
      clearTimeout(this.#timers.say);
      if (this.playing) return;
      this.#timers.say = setTimeout(() => {
        this.#parts.said.textContent = `Step ${this.#step} of ${this.#last}. ${this.#spec.say(this.values, this.#step)}`;
      }, 200);
    }

    // The address. Browsers limit how often it may be replaced (Safari: 100 times in 30 seconds), so a slider that is
    // dragged writes it once, and so does what plays fast.
    #writeAddress() {
      clearTimeout(this.#timers.write);
      this.#timers.write = setTimeout(() => {
        const parts = this.#spec.options.map((option) =>
          `${option.name}=${encodeURIComponent(KINDS[option.kind].write(this.#values[option.name]))}`);
        // A link may have been followed, of which we are told in a moment.
        if (location.hash !== this.#address) return;
        history.replaceState(history.state, "", `#${[...parts, `step=${this.#step}`].join("&")}`);
        this.#address = location.hash;
      }, this.playing ? 600 : 120);
    }
    /** Take the state that the address names, the first one if it names nothing; false if it is a heading's. */
    #readAddress() {
      const {options} = this.#spec;
      this.#address = location.hash;
      const given = new URLSearchParams(location.hash.slice(1));
      if (location.hash && !["step", ...options.map(({name}) => name)].some((name) => given.has(name))) return false;
      for (const option of options) {
        const text = given.get(option.name);
        this.#values[option.name] = text === null ? option.value : KINDS[option.kind].read(option, text);
      }
      const step = Number(given.get("step") ?? 0);
      this.#step = Number.isFinite(step) ? Math.round(step) : 0;
      return true;
    }
    /** A link was followed, or the browser went back. */
    #takeAddress() {
      if (!this.#readAddress()) return;
      this.pause();
      clearTimeout(this.#timers.write);
      this.redraw();
      this.#say();
    }

    // Keys.
    #press(event) {
      const {key, target} = event;
      const does = {
        ArrowLeft: () => this.go(this.#step - 1),
        ArrowRight: () => this.go(this.#step + 1),
        Home: () => this.go(0),
        End: () => this.go(this.#last),
        " ": () => this.#toggle(),
      }[key];
      if (!does || event.defaultPrevented || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
      // Elsewhere on the page these three scroll it.
      const scrolls = key === "Home" || key === "End" || (key === " " && !this.#isSeen());
      if ((scrolls && !this.#root.contains(target)) || usesKey(target, key)) return;
      event.preventDefault();
      if (key !== " " || !event.repeat) does(); // a finger that stays on the bar asks once
    }
    #isSeen() {
      const {top, bottom} = this.#root.getBoundingClientRect();
      return bottom > 0 && top < innerHeight;
    }
  }

  // -- the list of all events ----------------------------------------------------------------------------------

  /** Events of a run, each a button that leads to its step. The tab key stops once; arrow up and down go on from there. */
  class EventList {
    #list;
    #buttons = [];
    #run = null;
    #current = null;

    /** `go` is called with a step. */
    constructor(list, go) {
      this.#list = list;
      list.classList.add("rk-events");
      list.addEventListener("click", ({target}) => {
        const button = target.closest("button");
        if (button) go(Number(button.dataset.step));
      });
      list.addEventListener("focusin", ({target}) => this.#stopAt(target));
      list.addEventListener("keydown", (event) => this.#press(event));
    }

    /** If it is another run than the last time: its events, `eventsOf()` is a list of `{step, text, kind}` in order. */
    fill(run, eventsOf) {
      if (run === this.#run) return;
      this.#run = run;
      this.#current = null;
      const items = eventsOf().map(({step, text, kind}) => element("li", {class: `rk-event rk-event--${kind}`},
        element("button", {type: "button", tabindex: -1, "data-step": step},
          element("span", {class: "rk-at", text: step}), element("span", {text}))));
      this.#buttons = items.map((item) => item.firstChild);
      this.#list.replaceChildren(...items);
    }

    /** What has happened by now, and what of it last. */
    show(step) {
      const past = this.#buttons.filter((button) => Number(button.dataset.step) <= step);
      const latest = past.at(-1)?.dataset.step;
      this.#buttons.forEach((button, i) => {
        button.parentElement.classList.toggle("rk-event--ahead", i >= past.length);
        if (button.dataset.step === latest) button.setAttribute("aria-current", "step");
        else button.removeAttribute("aria-current");
      });
      const current = past.at(-1) ?? this.#buttons[0];
      if (current === this.#current || !current) return;
      this.#current = current;
      if (!this.#list.contains(document.activeElement)) this.#stopAt(current);
      this.#scrollTo(current);
    }

    #stopAt(button) {
      for (const other of this.#list.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
      button.tabIndex = 0;
    }
    /** Only the list scrolls, never the page. */
    #scrollTo(button) {
      const top = button.offsetTop;
      const {scrollTop, clientHeight} = this.#list;
      if (top >= scrollTop && top + button.offsetHeight <= scrollTop + clientHeight) return;
      this.#list.scrollTop = top - (clientHeight - button.offsetHeight) / 2;
    }
    #press(event) {
      const down = {ArrowUp: -1, ArrowDown: 1}[event.key];
      if (!down || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      this.#buttons[this.#buttons.indexOf(event.target) + down]?.focus();
    }
  }

  return {Player, EventList, element, count, listed, kept};
})();
