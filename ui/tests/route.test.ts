import { expect, test } from "vitest";
import { contentsPath, dashboardPath, incidentPath, jobPath, routeOf } from "../src/route";

test.each([
  ["/", { page: "jobs" }],
  ["/jobs", { page: "jobs" }],
  ["/nodes/", { page: "nodes" }],
  ["/nodes/node-1", { page: "node", name: "node-1" }],
  ["/dashboards", { page: "dashboard", name: "", span: "" }],
  ["/dashboards/training", { page: "dashboard", name: "training", span: "" }],
  ["/dashboards/training/6h", { page: "dashboard", name: "training", span: "6h" }],
  ["/dashboards/training/6h/x", { page: "unknown" }],
  ["/dashboards/%/6h", { page: "unknown" }],
  ["/jobs/team/train", { page: "job", namespace: "team", name: "train" }],
  ["/jobs/team/train/incidents/12", { page: "incident", namespace: "team", name: "train", number: 12 }],
  ["/jobs/team", { page: "unknown" }],
  ["/jobs/team/train/incidents/x", { page: "unknown" }],
  ["/jobs/team/train/incidents/1/2", { page: "unknown" }],
  ["/jobs/%/%", { page: "unknown" }],
  ["/elsewhere", { page: "unknown" }],
])("the address %s", (path, route) => {
  expect(routeOf(path)).toEqual(route);
});

test("names that are no part of a path stay one part", () => {
  const path = jobPath("a/b", "../../nodes?x#y");
  expect(path).toBe("/jobs/a%2Fb/..%2F..%2Fnodes%3Fx%23y");
  expect(routeOf(path)).toEqual({ page: "job", namespace: "a/b", name: "../../nodes?x#y" });
  expect(contentsPath(routeOf(incidentPath("a", "b", 3)))).toBe("jobs/a/b/incidents/3");
  expect(contentsPath({ page: "unknown" })).toBeNull();
  expect(dashboardPath("a/b", "1h")).toBe("/dashboards/a%2Fb/1h");
  expect(["", "nodes"].map((name) => dashboardPath(name, ""))).toEqual(["/dashboards", "/dashboards/nodes"]);
});
