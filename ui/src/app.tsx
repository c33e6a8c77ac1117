import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import type { DashboardPage, IncidentPage, JobPage, JobsPage, NodePage, NodesPage } from "./contents";
import { clock } from "./format";
import { Dashboard } from "./pages/dashboard";
import { Incident } from "./pages/incident";
import { Job } from "./pages/job";
import { Jobs } from "./pages/jobs";
import { Logs } from "./pages/logs";
import { Node } from "./pages/node";
import { Nodes } from "./pages/nodes";
import { contentsPath, type Route, routeOf } from "./route";
import { type Contents, useContents } from "./stream";

/** The account of the person who has signed in; empty: people do not sign in here. */
const PERSON = document.getElementById("page")?.dataset.person ?? "";

/** The whole page: its parts are chosen by the address. */
export function App() {
  const route = useRoute();
  const contents = useContents(contentsPath(route));
  const title = titleOf(route);
  useEffect(() => {
    document.title = `${title} · unbroken`;
  }, [title]);
  return (
    <>
      <a class="skip" href="#main">
        Skip to the contents
      </a>
      <header>
        <a class="brand" href="/jobs">
          unbroken
        </a>
        <nav aria-label="Pages">
          <Link to="/jobs" current={!["nodes", "node", "dashboard"].includes(route.page)}>
            Jobs
          </Link>
          <Link to="/nodes" current={route.page === "nodes" || route.page === "node"}>
            Nodes
          </Link>
          <Link to="/dashboards" current={route.page === "dashboard"}>
            Dashboards
          </Link>
        </nav>
        <Live contents={contents} />
        {PERSON && <SignOut />}
      </header>
      <main id="main" tabIndex={-1}>
        {contents.problem && (
          <p class="notice bad" role="alert">
            {contents.problem}
          </p>
        )}
        {contents.connection === "locked" && <Locked />}
        <Shown route={route} contents={contents} />
      </main>
    </>
  );
}

function Locked() {
  return (
    <p class="notice bad" role="alert">
      {PERSON ? (
        <>
          Your session has ended.{" "}
          <button type="button" onClick={() => location.reload()}>
            Sign in again
          </button>
        </>
      ) : (
        <>
          This browser has no access any more. Run <code>unbroken ui</code> and open its link.
        </>
      )}
    </p>
  );
}

function SignOut() {
  const leave = async () => {
    try {
      await fetch("/signout", { method: "POST" });
    } finally {
      location.reload();
    }
  };
  return (
    <button type="button" class="leave" title={`Signed in as ${PERSON}`} onClick={() => void leave()}>
      Sign out
    </button>
  );
}

function Link({ to, current, children }: { to: string; current: boolean; children: ComponentChildren }) {
  return (
    <a href={to} aria-current={current ? "page" : undefined}>
      {children}
    </a>
  );
}

function Live({ contents }: { contents: Contents }) {
  const since = contents.at ? ` since ${clock(contents.at)}` : "";
  const words = {
    connecting: "connecting",
    live: "live",
    lost: `not connected${since}`,
    locked: "locked",
  }[contents.connection];
  return (
    <p class={`live ${contents.connection}`} role="status">
      {words}
    </p>
  );
}

function Shown({ route, contents }: { route: Route; contents: Contents }) {
  if (route.page === "unknown") {
    return (
      <>
        <h1>There is no such page</h1>
        <p>
          <a href="/jobs">All jobs</a>
        </p>
      </>
    );
  }
  if (contents.value === null) {
    return (
      <>
        <h1>{titleOf(route)}</h1>
        {!contents.problem && <p class="quiet">Loading …</p>}
      </>
    );
  }
  // The server and this page are of one version, and the schemas of its answers are tested.
  switch (route.page) {
    case "jobs":
      return <Jobs page={contents.value as JobsPage} />;
    case "nodes":
      return <Nodes page={contents.value as NodesPage} />;
    case "node":
      return <Node page={contents.value as NodePage} />;
    case "dashboard":
      return <Dashboard page={contents.value as DashboardPage} />;
    case "job":
      return <Job page={contents.value as JobPage} />;
    case "logs":
      return <Logs page={contents.value as JobPage} key={location.search} />;
    case "incident":
      return <Incident page={contents.value as IncidentPage} />;
  }
}

function titleOf(route: Route): string {
  switch (route.page) {
    case "jobs":
      return "Jobs";
    case "nodes":
      return "Nodes";
    case "dashboard":
      return "Dashboards";
    case "job":
    case "node":
      return route.name;
    case "logs":
      return `Logs of ${route.name}`;
    case "incident":
      return `Incident ${route.number} of ${route.name}`;
    case "unknown":
      return "Not found";
  }
}

/** The address, which links inside of the page change without loading it again. */
function useRoute(): Route {
  const [path, setPath] = useState(location.pathname + location.search);
  useEffect(() => {
    const moved = () => setPath(location.pathname + location.search);
    const clicked = (event: MouseEvent) => {
      const link = event.target instanceof Element ? event.target.closest("a") : null;
      const own = link && link.origin === location.origin && !link.hasAttribute("download");
      if (!own || link.hash || event.button || event.defaultPrevented) return;
      if (event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
      event.preventDefault();
      history.pushState(null, "", link.pathname + link.search);
      moved();
      scrollTo(0, 0);
      document.getElementById("main")?.focus();
    };
    addEventListener("popstate", moved);
    addEventListener("click", clicked);
    return () => {
      removeEventListener("popstate", moved);
      removeEventListener("click", clicked);
    };
  }, []);
  return routeOf(path);
}
