// Runs chat.js or docs.js of the server at argv[2] on a page of a few lines, and prints what a user would see.
import vm from "node:vm";

const [base, script, ...words] = process.argv.slice(2);

class Element {
  constructor(tag) { Object.assign(this, { tag, children: [], value: "", hidden: false, listeners: {}, className: "" }); }
  set textContent(text) { this.children = text === "" ? [] : [String(text)]; }
  get textContent() { return this.children.map((child) => child.textContent ?? child).join(""); }
  append(...more) { this.children.push(...more); }
  replaceChildren(...more) { this.children = more; }
  insertBefore(made, before) { this.children.splice(this.children.indexOf(before), 0, made); }
  addEventListener(kind, call) { this.listeners[kind] = call; }
  focus() {}
}

const elements = {};
const document = {
  getElementById: (id) => (elements[id] ??= new Element(id)),
  createElement: (tag) => new Element(tag),
};
const wait = (check) => new Promise((resolve) => {
  const look = () => (check() ? resolve() : setTimeout(look, 5));
  look();
});
const context = vm.createContext({
  document, console, performance, setTimeout, AbortController, TextDecoderStream, URL,
  Option: class extends Element { constructor(text, value) { super("option"); this.textContent = text; this.value = value; } },
  location: { origin: base },
  fetch: (path, options) => fetch(base + path, options),
});
vm.runInContext(await (await fetch(`${base}/page/${script}`)).text(), context);

if (script === "docs.js") {
  await wait(() => elements.docs?.children.length > 1);
  console.log(elements.docs.textContent);
} else {
  await wait(() => elements.model?.children.length && elements.send.disabled === false);
  elements.model.value = elements.model.children[0].value;
  for (const word of words) {
    const stop = word.startsWith("stop:");
    elements.text.value = word.replace("stop:", "");
    elements.form.listeners.submit({ preventDefault() {} });
    const answer = elements.log.children.at(-1);
    if (stop) {
      await wait(() => answer.children[0].textContent.length > 3);
      elements.stop.listeners.click();
    }
    await wait(() => elements.stop.hidden);
    console.log(JSON.stringify(answer.children.map((child) => child.textContent)));
  }
}
process.exit(0);
