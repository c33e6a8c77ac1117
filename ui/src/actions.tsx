// Actions: the ones that the account may take, and the dialog that asks before each.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { ActionsPage } from "./contents";
import { type Outcome, send } from "./orders";

export type Action = ActionsPage["actions"][number];

/** The actions at a path below /api/page/actions/ that the account may take; none until they are known. */
export function useActions(path: string): Action[] {
  const [found, setFound] = useState<Action[]>([]);
  useEffect(() => {
    let left = false;
    const ask = async (): Promise<void> => {
      const answer = await fetch(`/api/page/actions/${path}`);
      if (!answer.ok) return;
      const page = (await answer.json()) as ActionsPage;
      if (!left) setFound(page.actions);
    };
    // Without an answer there are no actions, and the stream of the page says what is wrong.
    ask().catch(() => undefined);
    return () => {
      left = true;
    };
  }, [path]);
  return found;
}

export interface Field {
  /** Name of the value in the order. */
  name: string;
  label: string;
  value: string;
  required?: boolean;
  /** Values to choose from; without them, it is a text. */
  options?: string[];
  /** The words of the command for a value. */
  command: (value: string) => string;
}

/** An action on one object. */
export interface Choice {
  action: Action;
  /** The verb, such as Restart. */
  label: string;
  /** The order, without the values of the fields. */
  order: object;
  /** The object as the command names it. */
  words: string;
  fields?: Field[];
}

export interface Question {
  /** The object, such as `job train`. */
  subject: string;
  /** Actions to choose from, at least one. */
  choices: Choice[];
}

/** A dialog of the page, and the function that opens it. */
export function useQuestion(): [ComponentChildren, (question: Question) => void] {
  const [question, ask] = useState<Question | null>(null);
  return [question && <Dialog question={question} done={() => ask(null)} />, ask];
}

function Dialog({ question, done }: { question: Question; done: () => void }) {
  const { choices, subject } = question;
  const place = useRef<HTMLDialogElement>(null);
  const [index, setIndex] = useState(0);
  const [typed, setTyped] = useState<Record<string, string>>({});
  const [outcome, setOutcome] = useState<Outcome | "sent" | null>(null);
  useEffect(() => place.current?.showModal(), []);
  const choice = choices[index] ?? choices[0];
  if (!choice) return null;
  const fields = choice.fields ?? [];
  const valueOf = (field: Field): string => typed[field.name] ?? field.value;
  const carryOut = async (event: Event): Promise<void> => {
    event.preventDefault();
    setOutcome("sent");
    const values = Object.fromEntries(fields.map((field) => [field.name, valueOf(field)]));
    setOutcome(await send({ action: choice.action.action, ...choice.order, ...values }));
  };
  const command = [choice.action.command, choice.words, ...fields.map((field) => field.command(valueOf(field)))];
  const isOver = outcome !== null && outcome !== "sent";
  return (
    <dialog ref={place} aria-labelledby="question" onClose={done}>
      <form onSubmit={carryOut}>
        <h2 id="question">
          {choices.length === 1 ? `${choice.label} ${subject}?` : `What should be done with ${subject}?`}
        </h2>
        <fieldset disabled={outcome !== null}>
          {choices.length > 1 && (
            <label>
              Action
              <select value={String(index)} onChange={(event) => setIndex(Number(event.currentTarget.value))}>
                {choices.map((one, number) => (
                  <option value={String(number)} key={one.label}>
                    {one.label}
                  </option>
                ))}
              </select>
            </label>
          )}
          <p>
            <Words text={choice.action.words} />
          </p>
          {fields.map((field) => (
            <FieldOf
              field={field}
              value={valueOf(field)}
              change={(value) => setTyped((before) => ({ ...before, [field.name]: value }))}
              key={field.name}
            />
          ))}
        </fieldset>
        <p class="quiet">
          In a terminal: <code>{command.filter(Boolean).join(" ")}</code>
        </p>
        {outcome === "sent" && <p role="status">Being done …</p>}
        {isOver && "result" in outcome && (
          <p class="notice good" role="status">
            {outcome.result}
          </p>
        )}
        {isOver && "problem" in outcome && (
          <p class="notice bad" role="alert">
            <Words text={outcome.problem} />
          </p>
        )}
        <p class="buttons">
          {!isOver && (
            <button class="main" disabled={outcome !== null}>
              {choice.label}
            </button>
          )}
          {/* Enter alone takes no action. */}
          <button type="button" autofocus onClick={() => place.current?.close()}>
            {outcome === null ? "Cancel" : "Close"}
          </button>
        </p>
      </form>
    </dialog>
  );
}

function FieldOf(props: { field: Field; value: string; change: (value: string) => void }) {
  const { field, value, change } = props;
  return (
    <label>
      {field.label}
      {field.options ? (
        <select value={value} onChange={(event) => change(event.currentTarget.value)}>
          {field.options.map((one) => (
            <option key={one}>{one}</option>
          ))}
        </select>
      ) : (
        <input
          type="text"
          value={value}
          required={field.required}
          maxLength={500}
          onInput={(event) => change(event.currentTarget.value)}
        />
      )}
    </label>
  );
}

/** A text of a command's help, with what stands in backticks as code. */
export function Words({ text }: { text: string }) {
  return (
    <>
      {text.split("`").map((part, index) => (index % 2 ? <code key={index}>{part}</code> : part))}
    </>
  );
}
