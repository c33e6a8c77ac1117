import { act, cleanup, fireEvent, render, within } from "@testing-library/preact";
import axe from "axe-core";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { Action } from "../src/actions";
import { keepKey } from "../src/orders";
import { Job } from "../src/pages/job";
import { Nodes } from "../src/pages/nodes";
import { HOSTILE, jobPage, NO_LINKS, nodeRow } from "./samples";

const KEY = "0123456789abcdef".repeat(4);
const ACTIONS: Action[] = ["restart", "suspend", "resume", "detector"].map((action) => ({
  action,
  command: `unbroken ${action}`,
  words: `Words of ${action}; \`unbroken resume\` continues it.`,
}));

let offered: Action[];
let orders: RequestInit[];
let answer: () => Response;

beforeEach(() => {
  offered = ACTIONS;
  orders = [];
  answer = () => Response.json({ result: "train: restart requested" });
  vi.stubGlobal("fetch", (url: string, init?: RequestInit) => {
    if (url === "/api/page/actions/jobs/default") return Promise.resolve(Response.json({ actions: offered }));
    if (url === "/api/page/actions/nodes") return Promise.resolve(Response.json({ actions: offered }));
    expect(url).toBe("/api/orders");
    orders.push(init ?? {});
    return Promise.resolve().then(answer);
  });
});
afterEach(() => {
  cleanup();
  localStorage.clear();
  vi.unstubAllGlobals();
});

async function buttons(state: string): Promise<string[]> {
  const { container, unmount } = render(<Job page={jobPage({ state })} />);
  // The answer about the actions is taken.
  await act(async () => void (await new Promise((done) => setTimeout(done))));
  const found = within(container as HTMLElement).queryAllByRole("button").map((one) => one.textContent ?? "");
  unmount();
  return found.filter((one) => ["Restart", "Suspend", "Resume"].includes(one));
}

async function opened(verb: string) {
  const page = render(<Job page={jobPage()} />);
  fireEvent.click(await page.findByRole("button", { name: verb }));
  const dialog = await page.findByRole("dialog");
  return { page, dialog, inside: within(dialog) };
}

test("a job has the actions that its state and the account allow", async () => {
  expect(await buttons("Running")).toEqual(["Restart", "Suspend"]);
  expect(await buttons("Suspended")).toEqual(["Resume"]);
  expect(await buttons("Completed")).toEqual([]);
  offered = [];
  expect(await buttons("Running")).toEqual([]);
});

test("an action asks in the words of the command, and Cancel does nothing", async () => {
  const { page, dialog, inside } = await opened("Suspend");
  inside.getByRole("heading", { name: "Suspend job train?" });
  expect(dialog.textContent).toContain("Words of suspend; unbroken resume continues it.");
  expect(within(dialog).getAllByText("unbroken resume")[0]?.tagName).toBe("CODE");
  inside.getByText("unbroken suspend train");
  const options = { rules: { "color-contrast": { enabled: false } } };
  expect((await axe.run(dialog, options)).violations).toEqual([]);
  fireEvent.click(inside.getByRole("button", { name: "Cancel" }));
  await vi.waitFor(() => expect(page.queryByRole("dialog")).toBeNull());
  expect(orders).toEqual([]);
});

test("an order carries the key, and its result is shown in place", async () => {
  localStorage.setItem("unbroken-key", KEY);
  const { inside } = await opened("Restart");
  fireEvent.click(inside.getByRole("button", { name: "Restart" }));
  expect((await inside.findByText("train: restart requested")).getAttribute("role")).toBe("status");
  expect(orders).toHaveLength(1);
  expect(orders[0]?.method).toBe("POST");
  expect(orders[0]?.headers).toEqual({ "Content-Type": "application/json", "X-Unbroken-Key": KEY });
  expect(JSON.parse(String(orders[0]?.body))).toEqual({
    action: "restart",
    namespace: "default",
    name: "train",
    uid: "u-1",
  });
  expect(inside.queryByRole("button", { name: "Restart" })).toBeNull();
  inside.getByRole("button", { name: "Close" });
});

test.each<[string, () => Response, string]>([
  ["refusal", () => Response.json({ problem: HOSTILE }, { status: 409 }), HOSTILE],
  ["odd answer", () => Response.json([], { status: 500 }), "The server's answer is not understood (500)."],
  ["no JSON", () => new Response("<h1>"), "Look whether the action was done"],
  [
    "lost connection",
    () => {
      throw new TypeError("no");
    },
    "Look whether the action was done",
  ],
])("a %s is shown as text in place", async (_, given, text) => {
  answer = given;
  const { inside } = await opened("Restart");
  fireEvent.click(inside.getByRole("button", { name: "Restart" }));
  expect((await inside.findByRole("alert")).textContent).toContain(text);
  expect(document.title).not.toContain("broken into");
});

test("the dialog stays when the job changes under it", async () => {
  const { page, inside } = await opened("Suspend");
  fireEvent.click(inside.getByRole("button", { name: "Suspend" }));
  await inside.findByRole("status");
  page.rerender(<Job page={jobPage({ state: "Suspended" })} />);
  await inside.findByText("train: restart requested");
});

test("a detector's mode is chosen and set", async () => {
  const page = render(<Job page={jobPage()} />);
  fireEvent.click(await page.findByLabelText(/^Set the mode of stopped/));
  const inside = within(await page.findByRole("dialog"));
  fireEvent.change(inside.getByLabelText("Mode"), { target: { value: "warn" } });
  inside.getByText("unbroken detector train stopped=warn");
  fireEvent.click(inside.getByRole("button", { name: "Set" }));
  await inside.findByRole("status");
  const order = {
    action: "detector",
    namespace: "default",
    name: "train",
    uid: "u-1",
    detector: "stopped",
    mode: "warn",
  };
  expect(JSON.parse(String(orders[0]?.body))).toEqual(order);
});

test("a node has the actions that fit its state, with what they need", async () => {
  const command = (action: string) => ({ action, command: `unbroken nodes ${action}`, words: `To ${action}.` });
  offered = ["drain", "uncordon", "reset", "clear"].map(command);
  const cordoned = nodeRow({ name: "node-1", schedulable: false, score: 0 });
  const page = render(<Nodes page={{ nodes: [nodeRow(), cordoned], missing: [], links: NO_LINKS }} />);
  const labels = async (name: string) => {
    fireEvent.click(await page.findByRole("button", { name: `Actions on ${name}` }));
    const inside = within(await page.findByRole("dialog"));
    return { inside, found: inside.getAllByRole("option").map((one) => one.textContent) };
  };
  const other = await labels("node-1");
  expect(other.found).toEqual(["Uncordon", "Reset GPUs"]);
  fireEvent.click(other.inside.getByRole("button", { name: "Cancel" }));
  await vi.waitFor(() => expect(page.queryByRole("dialog")).toBeNull());
  const { inside, found } = await labels("node-0");
  expect(found).toEqual(["Drain", "Reset GPUs", "Clear blame"]);
  fireEvent.change(inside.getByLabelText("Action"), { target: { value: "2" } });
  inside.getByText("To clear.");
  const why = inside.getByLabelText(/^Reason/);
  expect(why.hasAttribute("required")).toBe(true);
  fireEvent.input(why, { target: { value: "it's new" } });
  inside.getByText("unbroken nodes clear node-0 --why 'it'\\''s new'");
  fireEvent.click(inside.getByRole("button", { name: "Clear blame" }));
  await inside.findByRole("status");
  expect(JSON.parse(String(orders[0]?.body))).toEqual({ action: "clear", name: "node-0", why: "it's new" });
});

test("the key is moved out of the address, and nothing else is", () => {
  history.replaceState(null, "", `/jobs#key=${KEY}`);
  keepKey();
  expect(location.href).toMatch(/\/jobs$/);
  expect(localStorage.getItem("unbroken-key")).toBe(KEY);
  for (const fragment of ["#main", "#key=", "#key=<script>", `#key=${KEY}&x`]) {
    history.replaceState(null, "", `/jobs${fragment}`);
    keepKey();
    expect(localStorage.getItem("unbroken-key")).toBe(KEY);
  }
  history.replaceState(null, "", "/");
});
