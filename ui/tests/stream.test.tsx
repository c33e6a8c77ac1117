import { act, cleanup, render } from "@testing-library/preact";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { AGAIN, type Contents, useContents } from "../src/stream";

/** The browser's streams, played by the test. */
class Source extends EventTarget {
  static readonly CLOSED = 2;
  static opened: Source[] = [];
  readyState = 0;
  onopen: (() => void) | null = null;
  onerror: (() => void) | null = null;
  constructor(readonly url: string) {
    super();
    Source.opened.push(this);
  }
  close() {
    this.readyState = Source.CLOSED;
  }
  send(kind: string, value: unknown) {
    act(() => void this.dispatchEvent(new MessageEvent(kind, { data: JSON.stringify(value) })));
  }
  fail(state: number) {
    this.readyState = state;
    act(() => this.onerror?.());
  }
}

let found: Contents;
function Page({ path }: { path: string | null }) {
  found = useContents(path);
  return null;
}
const later = (milliseconds: number) =>
  act(async () => {
    await vi.advanceTimersByTimeAsync(milliseconds);
  });
const newest = () => Source.opened[Source.opened.length - 1] as Source;

beforeEach(() => {
  vi.useFakeTimers();
  Source.opened = [];
  vi.stubGlobal("EventSource", Source);
  vi.stubGlobal("fetch", async () => new Response("", { status: 503 }));
});
afterEach(() => {
  cleanup();
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

test("contents come by the stream of the page", () => {
  render(<Page path="jobs" />);
  expect(newest().url).toBe("/api/stream/jobs");
  newest().send("contents", { jobs: [] });
  expect(found).toMatchObject({ value: { jobs: [] }, connection: "live", problem: "" });
});

test("the last contents stay while the stream is cut, and the browser opens it again", () => {
  render(<Page path="jobs" />);
  newest().send("contents", { jobs: [1] });
  newest().fail(0);
  expect(found).toMatchObject({ value: { jobs: [1] }, connection: "lost" });
  expect(Source.opened).toHaveLength(1);
  newest().send("contents", { jobs: [2] });
  expect(found).toMatchObject({ value: { jobs: [2] }, connection: "live" });
});

test("a stream that was refused is opened again until it is there", async () => {
  render(<Page path="jobs" />);
  for (let tries = 2; tries < 5; tries++) {
    newest().fail(Source.CLOSED);
    await later(AGAIN);
    expect(Source.opened).toHaveLength(tries);
  }
});

test("a browser without access is told so, and sees the page once it has access", async () => {
  vi.stubGlobal("fetch", async () => new Response("", { status: 401 }));
  render(<Page path="jobs" />);
  newest().fail(Source.CLOSED);
  await later(1);
  expect(found.connection).toBe("locked");
  await later(AGAIN);
  newest().send("contents", {});
  expect(found.connection).toBe("live");
});

test("another page does not show the contents of the one before", () => {
  const { rerender } = render(<Page path="jobs" />);
  const first = newest();
  first.send("contents", { jobs: [] });
  rerender(<Page path="nodes" />);
  expect(found.value).toBeNull();
  expect(first.readyState).toBe(Source.CLOSED);
  expect(newest().url).toBe("/api/stream/nodes");
});

test("a problem is told beside the last contents", () => {
  render(<Page path="jobs/a/b" />);
  newest().send("contents", { name: "b" });
  newest().send("problem", { problem: 'no job "b"' });
  expect(found).toMatchObject({ value: { name: "b" }, problem: 'no job "b"' });
});

test("a hidden tab holds no stream", () => {
  render(<Page path="jobs" />);
  const seen = vi.spyOn(document, "visibilityState", "get").mockReturnValue("hidden");
  act(() => void document.dispatchEvent(new Event("visibilitychange")));
  expect(newest().readyState).toBe(Source.CLOSED);
  seen.mockReturnValue("visible");
  act(() => void document.dispatchEvent(new Event("visibilitychange")));
  expect(Source.opened).toHaveLength(2);
  seen.mockRestore();
});

test("a tab that is hidden while a refusal is looked into opens no stream until it is seen", async () => {
  let answered = (_: Response) => {};
  vi.stubGlobal("fetch", () => new Promise<Response>((resolve) => (answered = resolve)));
  render(<Page path="jobs" />);
  newest().fail(Source.CLOSED);
  const seen = vi.spyOn(document, "visibilityState", "get").mockReturnValue("hidden");
  act(() => void document.dispatchEvent(new Event("visibilitychange")));
  answered(new Response("", { status: 503 }));
  await later(AGAIN * 5);
  expect(Source.opened).toHaveLength(1);
  seen.mockReturnValue("visible");
  act(() => void document.dispatchEvent(new Event("visibilitychange")));
  expect(Source.opened).toHaveLength(2);
  seen.mockRestore();
});

test("a page that is left opens no stream later", async () => {
  const { unmount } = render(<Page path="jobs" />);
  newest().fail(Source.CLOSED);
  unmount();
  await vi.advanceTimersByTimeAsync(AGAIN * 5);
  expect(Source.opened).toHaveLength(1);
});
