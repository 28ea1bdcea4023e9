// Shows the events of the gateway. Names come from tenants and peers: they are written as text
// content or attribute values alone, never as markup.
"use strict";

const element = (id) => document.getElementById(id);
let last = null; // The last event.
let received = 0; // Its time.
let source = null;
let wanted = ""; // Service whose endpoints are shown.

// --- Texts

const TRUNCATED = 44;
const shortened = (text) => (text.length > TRUNCATED ? text.slice(0, TRUNCATED - 1) + "…" : text);
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const percent = (part, whole) => (whole > 0 ? Math.round((100 * part) / whole) : 0);
const seconds = (time) => Date.parse(time) / 1000;

function duration(total) {
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const [unit, length] = units.find(([, length]) => total >= 2 * length) ?? units[3];
  return `${Math.max(0, Math.floor(total / length))} ${unit}`;
}

function bytes(count) {
  const power = count < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(count) / 10));
  const unit = ["B", "KiB", "MiB", "GiB", "TiB"][power];
  return `${Math.round((10 * count) / 1024 ** power) / 10} ${unit}`;
}

function milliseconds(microseconds) {
  return microseconds === null ? "–" : `${Math.round(microseconds / 10) / 100} ms`;
}

// --- Cells: a text, or an object with a kind, a text and what the kind needs

const mark = (kind, text) => ({ kind: "mark", text, className: `mark ${kind}` });
const code = (text) => (text === null ? "–" : { kind: "code", text, className: "" });
const number = (text) => ({ kind: "number", text: String(text), className: "" });
const wide = (text) => ({ kind: "wide", text, className: "" });
const bar = (value) => ({ kind: "bar", text: `${value}%`, className: "", value });
const choice = (text, pick) => ({ kind: "choice", text, className: "", pick });
const TAGS = { mark: "span", code: "code", choice: "button", bar: "span" };

const GATEWAY_MARKS = { ready: "good", healthy: "good", idle: "good", connecting: "warn" };
const gatewayMark = (state) => mark(GATEWAY_MARKS[state] ?? "bad", state);

// Creates the content of a cell, or changes only what differs, so that focus and selection stay.
function setCell(cell, content) {
  const { kind, text, className, value, pick } =
    typeof content === "string" ? { kind: "text", text: content, className: "" } : content;
  if (cell.dataset.kind !== kind) {
    cell.dataset.kind = kind;
    cell.className = { code: "wide", wide: "wide", number: "number", bar: "bar" }[kind] ?? "";
    cell.replaceChildren();
    if (TAGS[kind]) cell.append(document.createElement(TAGS[kind]));
    if (kind === "bar") cell.append(document.createElement("meter"));
  }
  const inner = TAGS[kind] ? cell.firstChild : cell;
  if (inner.textContent !== text) inner.textContent = text;
  if (inner !== cell && inner.className !== className) inner.className = className;
  if (kind === "choice") {
    inner.type = "button";
    inner.onclick = pick;
  }
  if (kind === "bar") {
    const meter = cell.lastChild;
    meter.max = 100;
    meter.value = value;
    meter.setAttribute("aria-hidden", "true"); // The text beside it has the number.
  }
}

function setTable(id, rows) {
  const table = element(id);
  const body = table.tBodies[0];
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, index) => {
    const row = body.rows[index] ?? body.insertRow();
    cells.forEach((content, column) => {
      if (!row.cells[column]) {
        const cell = document.createElement(column === 0 ? "th" : "td");
        if (column === 0) cell.scope = "row";
        row.append(cell);
      }
      setCell(row.cells[column], content);
    });
  });
  const box = table.parentElement;
  box.hidden = rows.length === 0;
  box.nextElementSibling.hidden = rows.length > 0;
  box.tabIndex = box.scrollWidth > box.clientWidth ? 0 : -1;
}

// A table that is wider than the screen scrolls by itself, also by keyboard.
function wrapTables() {
  for (const table of document.querySelectorAll("table")) {
    const box = document.createElement("div");
    box.className = "scroll";
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", table.caption.textContent.trim());
    table.replaceWith(box);
    box.append(table);
    box.hidden = true;
    table.hidden = false;
    const none = document.createElement("p");
    none.className = "none";
    none.textContent = table.dataset.none ?? "";
    none.hidden = true;
    box.after(none);
  }
}

// --- Map

const ROW = 18;

function shape(parent, name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

// Returns the other networks with their gateways, and the clusters of links without a gateway.
function networksOf(peers) {
  const found = new Map();
  const network = (name, cluster) => {
    const key = JSON.stringify([name, cluster]);
    if (!found.has(key)) found.set(key, { name, cluster, gateways: [] });
    return found.get(key);
  };
  for (const row of peers.gateways) network(row.network, row.cluster).gateways.push(row);
  const reached = new Set([...found.values()].map(({ cluster }) => cluster));
  for (const { from, to } of peers.links) {
    const cluster = from === peers.cluster ? to : from;
    if (!reached.has(cluster)) network(null, cluster);
  }
  return [...found.values()].map((one) => {
    const link = (from, to) => peers.links.find((link) => link.from === from && link.to === to);
    const sum = one.gateways.reduce((sum, { tunnels }) => sum + tunnels, 0);
    const lines = one.gateways.slice(0, 4).map(({ address, state, rttMicroseconds: rtt }) =>
      `${address} ${state}` + (rtt === null ? "" : ` ${milliseconds(rtt)}`));
    if (one.gateways.length > 4) lines.push(`and ${one.gateways.length - 4} more`);
    if (one.gateways.length === 0) lines.push("no gateway is known");
    return {
      title: (one.name === null ? "" : `network ${one.name}, `) + `cluster ${one.cluster}`,
      lines,
      out: link(peers.cluster, one.cluster)?.linked ?? true,
      in: link(one.cluster, peers.cluster)?.linked ?? true,
      tunnels: sum,
    };
  });
}

// A line through points, with a head at its end, and its label.
function arrow(svg, points, linked, text, [x, y, anchor]) {
  const [[x1, y1], [x2, y2]] = points.slice(-2);
  const angle = (Math.atan2(y2 - y1, x2 - x1) * 180) / Math.PI;
  shape(svg, "polyline", { points: points.join(" "), class: linked ? "" : "off" });
  shape(svg, "path", {
    d: "M0 0L-9 -4.5V4.5z", transform: `translate(${x2} ${y2}) rotate(${angle})`,
  });
  shape(svg, "text", { x, y, class: "soft", "text-anchor": anchor }, text);
}

function drawMap(peers) {
  const others = networksOf(peers);
  const width = Math.max(300, element("map").clientWidth);
  const known = JSON.stringify([width, peers.network, peers.cluster, others]);
  if (element("map").dataset.drawn === known) return;
  element("map").dataset.drawn = known;
  const isNarrow = width < 700;
  const boxWidth = isNarrow ? width - 48 : Math.min(460, Math.round(width * 0.42));
  const heights = others.map(({ lines }) => 34 + ROW * lines.length);
  const gap = isNarrow ? 52 : 24;
  const sum = heights.reduce((sum, height) => sum + height + gap, 0);
  const ownHeight = 52;
  const height = isNarrow ? ownHeight + sum + 10 : Math.max(sum, ownHeight + gap);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const permitted = (linked) => (linked ? "permitted" : "not permitted");
  const describe = ({ title, lines, out, in: back, tunnels }) =>
    `${title}: ${lines.join("; ")}; to it ${permitted(out)}, ${plural(tunnels, "tunnel")}; ` +
    `from it ${permitted(back)}`;
  const label = [`Map. This gateway is in network ${peers.network}`, ...others.map(describe)];
  for (const [key, value] of Object.entries({
    role: "img", width, height, viewBox: `0 0 ${width} ${height}`, "aria-label": label.join(". "),
  })) svg.setAttribute(key, value);
  const box = (x, y, w, h, title, lines, className) => {
    shape(svg, "rect", { x, y, width: w, height: h, rx: 6, class: className });
    shape(svg, "text", { x: x + 12, y: y + 22, class: "title" }, shortened(title));
    lines.forEach((line, index) =>
      shape(svg, "text", { x: x + 12, y: y + 22 + ROW * (index + 1) }, shortened(line)));
  };
  const ownWidth = isNarrow ? width - 8 : Math.min(260, width * 0.26);
  const ownY = isNarrow ? 4 : (height - ownHeight) / 2;
  const ownLines = [`this gateway, cluster ${peers.cluster}`];
  box(4, ownY, ownWidth, ownHeight, `network ${peers.network}`, ownLines, "own");
  const [left, bottom, x] = [4 + ownWidth, ownY + ownHeight, width - boxWidth - 4];
  let y = isNarrow ? ownHeight + gap : gap / 2;
  others.forEach((other, index) => {
    const middle = y + heights[index] / 2;
    const [to, from] = [middle - 8, middle + 8];
    box(x, y, boxWidth, heights[index], other.title, other.lines, "");
    const out = `to it: ${other.out ? plural(other.tunnels, "tunnel") : permitted(false)}`;
    const back = `from it: ${permitted(other.in)}`;
    if (isNarrow) {
      const label = (y) => [x, y, "start"];
      arrow(svg, [[28, bottom], [28, to], [x - 1, to]], other.out, out, label(y - 26));
      arrow(svg, [[x, from], [14, from], [14, bottom + 1]], other.in, back, label(y - 9));
    } else {
      const label = (y) => [x - 16, y, "end"];
      const [near, far, start, end] = [left + 18, left + 32, ownY + 18, ownY + 34];
      const there = [[left, start], [far, start], [far, to], [x - 1, to]];
      const here = [[x, from], [near, from], [near, end], [left + 1, end]];
      arrow(svg, there, other.out, out, label(to - 6));
      arrow(svg, here, other.in, back, label(from + 16));
    }
    y += heights[index] + gap;
  });
  element("map").replaceChildren(svg);
}

// --- Sections

function showHead({ status }) {
  const { version, cluster, network } = status;
  element("name").textContent = `${version}, cluster ${cluster}, network ${network}`;
  document.title = `${status.ready ? "" : "not ready: "}Strait ${cluster}`;
  const state = element("state");
  const text = status.ready ? "ready" : `not ready, pending: ${status.pending.join(", ")}`;
  if (state.textContent !== text) state.textContent = text;
  state.className = `mark ${status.ready ? "good" : "bad"}`;
  element("problems").hidden = status.problems.length === 0;
  const list = element("problem-list");
  while (list.children.length > status.problems.length) list.lastChild.remove();
  status.problems.forEach((problem, index) => {
    const item = list.children[index] ?? list.appendChild(document.createElement("li"));
    if (item.textContent !== problem) item.textContent = problem;
  });
}

function showNetworks({ peers }) {
  drawMap(peers);
  setTable("gateway-table", peers.gateways.map((row) => [
    row.address, row.network, row.cluster, gatewayMark(row.state),
    number(milliseconds(row.rttMicroseconds)), bar(row.sharePercent), number(row.tunnels),
    number(row.connections), number(row.ejections), row.error || "–",
  ]));
  const traffic = (row) => {
    const { tunnels, ready, gateways, accepted, refused } = row;
    if (gateways !== undefined) {
      return `${plural(tunnels, "tunnel")}, ${ready} of ${plural(gateways, "gateway")} ready`;
    }
    return accepted === null ? "–" : `${plural(accepted, "handshake")}, ${refused} refused`;
  };
  const budget = (row) => {
    const found = peers.budgets.find(({ from, to }) => from === row.from && to === row.to);
    if (!found) return "–";
    const { usedBytes, budgetBytes, weightPercent } = found;
    return `${bytes(usedBytes)} of ${bytes(budgetBytes)}, weight ${weightPercent}%`;
  };
  setTable("link-table", peers.links.map((row) => [
    row.from, row.to, row.linked ? mark("good", "yes") : mark("warn", "no"), traffic(row),
    budget(row),
  ]));
}

function showServices({ status, peers }) {
  const { total, list } = status.services;
  const rest = total > list.length ? `, ${list.length} of ${total}; find others by name` : "";
  element("service-count").textContent = rest;
  const workloads = (row) => {
    const kind = row.used === row.total ? "good" : row.used === 0 ? "bad" : "warn";
    return mark(kind, `${row.used} of ${row.total}`);
  };
  setTable("service-table", list.map((row) => [
    choice(row.service, () => find(row.service)), row.ports.join(", "), workloads(row),
    number(row.tunnels), wide(row.exposedTo.join("; ")),
  ]));
  setTable("load-table", peers.loads.map((row) => [
    row.service, row.gateway, number(row.counted), number(row.free ?? "–"),
    number(`${row.dialMilliseconds} ms`), number(Math.round(row.factor * 100) / 100),
  ]));
}

function showTunnels({ status, peers }) {
  const pool = status.shares.find(({ resource, of }) => resource === "tunnels" && of === null);
  setTable("source-table", (pool?.holders ?? []).map(({ source, held }) => [
    source, number(held), bar(percent(held, pool.used)),
  ]));
  setTable("peer-table", peers.peers.map((row) => [row.identity, number(row.in), number(row.out)]));
}

function showRefusals({ status, refusals }) {
  const age = Number(element("age").value);
  const now = seconds(status.at);
  const recent = refusals.refusals.filter(({ last }) => now - seconds(last) <= age);
  setTable("refusal-table", recent.map((row) => [
    row.reason, number(row.count), number(`${duration(now - seconds(row.last))} ago`),
    [row.identity ?? row.address, row.firstPeer].filter(Boolean).join(" for "),
    row.authority ?? row.sni ?? "–", row.error ?? "–", code(row.explain),
  ]));
}

function showCertificates({ status, peers }) {
  const now = seconds(status.at);
  const row = (of, kind, state, time, problem) => {
    const left = time ? seconds(time) - now : NaN;
    const shown = Number.isNaN(left) ? "–" : left <= 0 ? mark("bad", "ended") : duration(left);
    return [of, kind, state, time || "–", shown, problem || "–"];
  };
  const own = status.certificates.map(({ identity, state, expires, renewalProblem }) => {
    const shown = mark(state === "Available" ? "good" : "bad", state);
    const kind = identity.startsWith("spiffe:") ? "own certificate" : "first root to end";
    return row(identity, kind, shown, expires, renewalProblem);
  });
  const gateways = peers.gateways.filter(({ expires }) => expires !== null);
  const remote = gateways.map(({ identity, address, expires }) =>
    row(identity ?? address, `gateway ${address}`, "presented", expires));
  const lists = status.crls.map(({ issuer, stale, nextUpdate, file }) => {
    const shown = stale ? mark("bad", "stale") : mark("good", "in use");
    return row(issuer, `revocation list ${file}`, shown, nextUpdate);
  });
  setTable("certificate-table", [...own, ...remote, ...lists]);
}

function showDrains({ status }) {
  const now = seconds(status.at);
  const isPlain = (name) => /^[A-Za-z0-9_.:/][A-Za-z0-9_.:/-]*$/.test(name);
  setTable("drain-table", status.drained.map(({ kind, name, since, persisted }) => [
    name, kind, number(`${duration(now - seconds(since))} ago`), persisted ? "keeps it" : "ends it",
    isPlain(name) ? code(`strait drain ${kind} ${name} --undo`) : "–",
  ]));
}

// --- Endpoints of one service, from the page of it

function find(name) {
  element("service").value = name;
  wanted = name.trim();
  element("endpoint-table").tBodies[0].replaceChildren();
  showEndpoints().then(() => element("find").scrollIntoView({ block: "nearest" }));
}

async function showEndpoints() {
  const name = wanted;
  if (name === "") {
    element("found").textContent = "";
    setTable("endpoint-table", []);
    return;
  }
  let list = [];
  let text = "";
  try {
    const answer = await fetch(`status?service=${encodeURIComponent(name)}`);
    if (answer.ok) list = (await answer.json()).services.list;
    else text = (await answer.text()).trim();
  } catch {
    text = "the gateway does not answer";
  }
  if (name !== wanted) return;
  const rows = list.flatMap(({ service, endpoints }) => {
    const sums = new Map();
    for (const { port, tunnels } of endpoints) sums.set(port, (sums.get(port) ?? 0) + tunnels);
    return endpoints.map((row) => [
      row.uid, service, number(row.port), row.address ?? "–",
      row.unused === null ? mark("good", "in use") : mark("warn", row.unused),
      number(row.weight), number(row.tunnels), bar(percent(row.tunnels, sums.get(row.port))),
    ]);
  });
  const more = list.reduce((sum, { more }) => sum + more, 0);
  text ||= plural(rows.length, "endpoint") + (more > 0 ? ` of ${rows.length + more}` : "");
  if (element("found").textContent !== text) element("found").textContent = text;
  setTable("endpoint-table", rows);
}

// --- Events

function show() {
  for (const section of [
    showHead, showNetworks, showServices, showTunnels, showRefusals, showCertificates, showDrains,
  ]) section(last);
}

function setLive(text) {
  if (element("live").textContent !== text) element("live").textContent = text;
}

function connect() {
  source?.close();
  source = new EventSource("dashboard/events");
  source.onmessage = ({ data }) => {
    last = JSON.parse(data);
    received = Date.now();
    setLive("updated each second");
    show();
    if (wanted !== "") showEndpoints();
  };
}

// The browser itself tries again after a lost connection, and not after a refusal.
function watch() {
  if (document.hidden || Date.now() - received < 5000) return;
  const since = received === 0 ? "" : ` since ${new Date(received).toLocaleTimeString()}`;
  setLive(`no data${since}: the gateway does not answer, or too many dashboards are open`);
  if (source.readyState === EventSource.CLOSED) connect();
}

wrapTables();
element("find").addEventListener("submit", (event) => {
  event.preventDefault();
  find(element("service").value);
});
element("age").addEventListener("change", () => last && showRefusals(last));
addEventListener("resize", () => last && show());
document.addEventListener("visibilitychange", () => (document.hidden ? source.close() : connect()));
setInterval(watch, 5000);
connect();
