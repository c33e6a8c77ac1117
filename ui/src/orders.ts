// Orders to the server, and the key that they need.

const NAME = "unbroken-key";
const FRAGMENT = /^#key=([0-9a-f]{16,256})$/;

/** The key of this visit, where the browser stores nothing. */
let unstored = "";

/** Move the key out of the address, where the answer to a link has put it. */
export function keepKey(): void {
  const found = FRAGMENT.exec(location.hash);
  if (!found?.[1]) return;
  unstored = found[1];
  try {
    localStorage.setItem(NAME, unstored);
  } catch {
    // It lasts until the page is loaded again.
  }
  history.replaceState(null, "", location.pathname + location.search);
}

function key(): string {
  try {
    return localStorage.getItem(NAME) ?? unstored;
  } catch {
    return unstored;
  }
}

export type Outcome = { result: string } | { problem: string };

/** Send an order, and return its result in a sentence, or why it was refused. */
export async function send(order: object): Promise<Outcome> {
  try {
    const answer = await fetch("/api/orders", {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Unbroken-Key": key() },
      body: JSON.stringify(order),
    });
    const value: unknown = await answer.json();
    if (value && typeof value === "object") {
      if ("result" in value && typeof value.result === "string") return { result: value.result };
      if ("problem" in value && typeof value.problem === "string") return { problem: value.problem };
    }
    return { problem: `The server's answer is not understood (${answer.status}).` };
  } catch {
    return { problem: "The server did not answer. Look whether the action was done before you repeat it." };
  }
}
