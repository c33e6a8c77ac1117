// Values of dashboards as texts, by the units' names in Grafana.
import { NONE, short, span } from "./format";

const STEPS = ["", "k", "M", "G", "T", "P"];

/** A number with a prefix for each factor of 1,000: `1.98 GHz`. */
function prefixed(value: number, unit: string): string {
  let step = 0;
  let rest = value;
  while (Math.abs(rest) >= 1000 && step < STEPS.length - 1) {
    rest /= 1000;
    step += 1;
  }
  return `${short(rest)} ${STEPS[step]}${unit}`;
}

/** A length of time, also one below 0: a difference. */
function seconds(value: number): string {
  return value < 0 ? `-${span(-value)}` : span(value);
}

const TEXTS: Record<string, (value: number) => string> = {
  percentunit: (value) => `${short(value * 100)}%`,
  percent: (value) => `${short(value)}%`,
  s: seconds,
  ms: (value) => seconds(value / 1000),
  Bps: (value) => prefixed(value, "B/s"),
  decmbytes: (value) => prefixed(value * 1e6, "B"),
  celsius: (value) => `${short(value)} °C`,
  watt: (value) => prefixed(value, "W"),
  hertz: (value) => prefixed(value, "Hz"),
};

/** A value with its unit; a unit that is not known adds nothing. */
export function withUnit(value: number | null, unit: string): string {
  if (value === null) return NONE;
  return (TEXTS[unit] ?? short)(value);
}
