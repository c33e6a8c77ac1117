// The address of the page says what it shows: it can be reloaded, kept and sent to a colleague.

export type Route =
  | { page: "jobs" }
  | { page: "nodes" }
  | { page: "node"; name: string }
  | { page: "dashboard"; name: string; span: string }
  | { page: "job"; namespace: string; name: string }
  | { page: "logs"; namespace: string; name: string }
  | { page: "incident"; namespace: string; name: string; number: number }
  | { page: "unknown" };

/** Read the path of an address; what comes after a question mark says which part of a page is shown. */
export function routeOf(address: string): Route {
  const [path = ""] = address.split("?");
  const parts = path.split("/").filter(Boolean).map(decoded);
  if (parts.length === 0 || (parts.length === 1 && parts[0] === "jobs")) return { page: "jobs" };
  if (parts.length === 1 && parts[0] === "nodes") return { page: "nodes" };
  if (parts.length === 2 && parts[0] === "nodes" && parts[1]) return { page: "node", name: parts[1] };
  if (parts[0] === "dashboards" && parts.length <= 3 && parts.every(Boolean)) {
    return { page: "dashboard", name: parts[1] ?? "", span: parts[2] ?? "" };
  }
  const [kind, namespace, name, below, number] = parts;
  if (kind !== "jobs" || !namespace || !name) return { page: "unknown" };
  if (parts.length === 3) return { page: "job", namespace, name };
  if (parts.length === 4 && below === "logs") return { page: "logs", namespace, name };
  if (parts.length === 5 && below === "incidents" && number && /^[0-9]{1,9}$/.test(number)) {
    return { page: "incident", namespace, name, number: Number(number) };
  }
  return { page: "unknown" };
}

function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return "";
  }
}

/** The address of a job's page. */
export function jobPath(namespace: string, name: string): string {
  return `/jobs/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}`;
}

/** The address of an incident's page. */
export function incidentPath(namespace: string, name: string, number: number): string {
  return `${jobPath(namespace, name)}/incidents/${number}`;
}

/** Lines of a job's logs to show; without a value, all of them. */
export interface LogChoice {
  rank?: number;
  pod?: string;
  /** Seconds since the epoch before which all lines are. */
  before?: number;
}

/** The address of lines of a job's logs. */
export function logsPath(namespace: string, name: string, choice: LogChoice = {}): string {
  const given = Object.entries(choice).filter(([, value]) => value !== undefined);
  const query = new URLSearchParams(given.map(([key, value]) => [key, String(value)])).toString();
  return `${jobPath(namespace, name)}/logs${query && `?${query}`}`;
}

/** The address of a node's page. */
export function nodePath(name: string): string {
  return `/nodes/${encodeURIComponent(name)}`;
}

/** The address of a dashboard that shows a span of time; empty: the first one, and the usual span. */
export function dashboardPath(name: string, span: string): string {
  return ["", "dashboards", name, span].map(encodeURIComponent).join("/").replace(/\/+$/, "");
}

/** The path of the contents below /api/page/ and /api/stream/; null: there are none. */
export function contentsPath(route: Route): string | null {
  switch (route.page) {
    case "jobs":
    case "nodes":
      return route.page;
    case "node":
      return nodePath(route.name).slice(1);
    case "job":
    case "logs": // its filters name the pods and attempts of the job
      return jobPath(route.namespace, route.name).slice(1);
    case "dashboard":
      return dashboardPath(route.name, route.span).slice(1);
    case "incident":
      return incidentPath(route.namespace, route.name, route.number).slice(1);
    case "unknown":
      return null;
  }
}
