// The live contents of a page: one stream of whole contents.  It is opened again after a cut and
// after a restart of the cluster, until the server answers.  A hidden tab holds no stream.
import { useEffect, useState } from "preact/hooks";

/** Milliseconds until a stream that the server has refused is opened again. */
export const AGAIN = 2000;

export type Connection = "connecting" | "live" | "lost" | "locked";

export interface Contents {
  /** The newest contents; null: none yet. */
  value: unknown;
  /** Why there are no newer contents; empty: there are. */
  problem: string;
  connection: Connection;
  /** When the newest contents came. */
  at: Date | null;
}

const NOTHING: Contents = { value: null, problem: "", connection: "connecting", at: null };

/** Follow the contents at a path below /api/; null: there is nothing to follow. */
export function useContents(path: string | null): Contents {
  const [found, setFound] = useState<{ path: string | null; contents: Contents }>({
    path,
    contents: NOTHING,
  });
  useEffect(() => {
    if (path === null) return undefined;
    const follower = new Follower(path, (change) =>
      setFound((before) => ({
        path,
        contents: { ...(before.path === path ? before.contents : NOTHING), ...change },
      })),
    );
    return () => follower.close();
  }, [path]);
  return found.path === path ? found.contents : NOTHING;
}

class Follower {
  private source: EventSource | null = null;
  private timer: ReturnType<typeof setTimeout> | null = null;
  private closed = false;

  constructor(
    private readonly path: string,
    private readonly tell: (change: Partial<Contents>) => void,
  ) {
    document.addEventListener("visibilitychange", this.seen);
    this.seen();
  }

  close(): void {
    this.closed = true;
    document.removeEventListener("visibilitychange", this.seen);
    this.end();
  }

  private readonly seen = (): void => {
    if (document.visibilityState === "hidden") this.end();
    else if (this.source === null) this.open();
  };

  private end(): void {
    this.source?.close();
    this.source = null;
    if (this.timer !== null) clearTimeout(this.timer);
    this.timer = null;
  }

  private open(): void {
    const source = new EventSource(`/api/stream/${this.path}`);
    this.source = source;
    source.onopen = () => this.tell({ connection: "live" });
    source.addEventListener("contents", (event: MessageEvent<string>) =>
      this.tell({
        value: JSON.parse(event.data),
        problem: "",
        connection: "live",
        at: new Date(),
      }),
    );
    source.addEventListener("problem", (event: MessageEvent<string>) =>
      this.tell({ problem: problemOf(event.data), connection: "live" }),
    );
    source.onerror = () => {
      this.tell({ connection: "lost" });
      // A browser opens a broken stream again by itself, but not one that was refused.
      if (source.readyState === EventSource.CLOSED) void this.refused();
    };
  }

  private async refused(): Promise<void> {
    this.end();
    try {
      const answer = await fetch(`/api/page/${this.path}`);
      if (answer.status === 401 && !this.closed) this.tell({ connection: "locked" });
    } catch {
      // Nobody listens: the next try is below.
    }
    if (!this.closed) this.timer = setTimeout(this.seen, AGAIN);
  }
}

function problemOf(text: string): string {
  const value: unknown = JSON.parse(text);
  const problem = value && typeof value === "object" && "problem" in value ? value.problem : "";
  return typeof problem === "string" ? problem : "";
}
