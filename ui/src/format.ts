// Numbers and times as texts.

export const NONE = "–";

/** A number of seconds as the commands write it: `3.214 s`, `4m 50s`, `2h 03m`, `3d 04h`. */
export function span(seconds: number): string {
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 3 : 1)} s`;
  const whole = Math.round(seconds);
  const two = (number: number) => String(number).padStart(2, "0");
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes}m ${two(whole % 60)}s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return `${hours}h ${two(minutes % 60)}m`;
  return `${Math.floor(hours / 24)}d ${two(hours % 24)}h`;
}

/** A share as `97.3%`, rounded down: only a job that lost nothing has 100. */
export function percent(share: number | null): string {
  return share === null ? NONE : `${(Math.floor(share * 1000) / 10).toFixed(1)}%`;
}

export function count(number: number | null): string {
  return number === null ? NONE : number.toLocaleString("en");
}

/** A number with three digits that count. */
export function short(number: number | null): string {
  if (number === null) return NONE;
  return Math.abs(number) >= 1000 ? count(Math.round(number)) : String(Number(number.toPrecision(3)));
}

/** `1 rank`, `2 ranks`. */
export function counted(number: number, noun: string): string {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** Local date and time of a time in RFC 3339. */
export function moment(time: string): string {
  const at = new Date(time);
  return Number.isNaN(at.getTime()) ? time : `${at.toLocaleDateString("sv")} ${clock(at)}`;
}

/** Local time of day with milliseconds. */
export function exactClock(time: string): string {
  const at = new Date(time);
  if (Number.isNaN(at.getTime())) return time;
  return `${clock(at)}.${String(at.getMilliseconds()).padStart(3, "0")}`;
}

/** Local time of day. */
export function clock(at: Date): string {
  return at.toLocaleTimeString("sv");
}

/** The age of a time in RFC 3339, as kubectl shows it. */
export function age(time: string, now: number): string {
  const seconds = Math.max(0, Math.floor((now - new Date(time).getTime()) / 1000));
  if (seconds < 120) return `${seconds}s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)}m`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)}h`;
  return `${Math.floor(seconds / 86400)}d`;
}
