// Written by `npm run types` from docs/reference/schemas; do not edit.

export interface JobsPage {
  /**
   * jobs
   */
  jobs: {
    /**
     * time of the end; null: not ended
     */
    completed: string | null;
    /**
     * time of creation
     */
    created: string;
    /**
     * pods of the last fault
     */
    faultyPods: string[];
    /**
     * partition of the job's time
     */
    goodput: {
      /**
       * incidents after which it is not known when training resumed
       */
      incidentsOfUnknownCost: number;
      /**
       * seconds lost by class of fault
       */
      lostSeconds: {};
      /**
       * steps that have to be repeated; null: not known
       */
      lostSteps: number | null;
      /**
       * seconds that made progress
       */
      productiveSeconds: number;
      /**
       * share of productive time, 0 to 1; null: not known
       */
      share: number | null;
      /**
       * seconds before the first progress
       */
      startupSeconds: number;
      /**
       * seconds of suspension, not part of the total
       */
      suspendedSeconds: number;
      /**
       * seconds of active time
       */
      totalSeconds: number;
    };
    /**
     * class of the last fault; empty: none
     */
    lastFault: string;
    /**
     * message for people
     */
    message: string;
    /**
     * name
     */
    name: string;
    /**
     * namespace
     */
    namespace: string;
    /**
     * pods that train and are ready
     */
    ready: number;
    /**
     * reason in one word
     */
    reason: string;
    /**
     * pods that train
     */
    replicas: number;
    /**
     * number of restarts
     */
    restarts: number;
    /**
     * spare pods
     */
    spares: number;
    /**
     * time of the start; null: not started
     */
    started: string | null;
    /**
     * state
     */
    state: string;
    /**
     * newest step of any rank; null: not known
     */
    step: number | null;
    /**
     * steps per second of the last 10 s; null: not known
     */
    stepsPerSecond: number | null;
    /**
     * ranks of the job; null: not known
     */
    worldSize: number | null;
  }[];
  /**
   * what Kubernetes has refused to show to the account of the page
   */
  missing: string[];
  /**
   * jobs of other kinds with auto-resume
   */
  resumed: {
    /**
     * time of creation
     */
    created: string;
    /**
     * kind
     */
    kind: string;
    /**
     * class of the last fault; empty: none
     */
    lastFault: string;
    /**
     * last loss; null: none
     */
    lastLoss: {
      /**
       * rank, pod or node that failed
       */
      culprit: string;
      /**
       * time of the decision
       */
      decidedAt: string;
      /**
       * time of the first sign
       */
      detectedAt: string;
      /**
       * class of the fault
       */
      fault: string;
      /**
       * time at which the job ran again; null: not yet
       */
      ranAgainAt: string | null;
      /**
       * remedy
       */
      remedy: string;
      /**
       * number of the restart; 0: the job was not restarted
       */
      restart: number;
      /**
       * seconds until training resumed; null: not yet, or not known
       */
      seconds: number | null;
    } | null;
    /**
     * name
     */
    name: string;
    /**
     * namespace
     */
    namespace: string;
    /**
     * number of restarts
     */
    restarts: number;
    /**
     * restarts that are allowed
     */
    restartsMax: number;
    /**
     * state
     */
    state: string;
  }[];
  /**
   * why no agent is asked; empty: agents are asked
   */
  unreached: string;
}

export interface JobPage {
  /**
   * time of the end; null: not ended
   */
  completed: string | null;
  /**
   * time of creation
   */
  created: string;
  /**
   * detectors of the job
   */
  detectors: {
    /**
     * name of the detector
     */
    detector: string;
    /**
     * what the detector looks for
     */
    means: string;
    /**
     * off, shadow, warn or act
     */
    mode: string;
    /**
     * right alarms on this job
     */
    right: number;
    /**
     * wrong alarms on this job
     */
    wrong: number;
  }[];
  /**
   * ranks that differ from the others, those with alarms first; at most 32
   */
  different: {
    /**
     * alarms
     */
    alarms: string[];
    /**
     * usual silence with a margin; null: still learning
     */
    allowedSeconds: number | null;
    /**
     * last sign of life; null: none yet
     */
    lastSign: string | null;
    /**
     * phase of training
     */
    phase: string;
    /**
     * name of the pod
     */
    pod: string;
    /**
     * rank
     */
    rank: number;
    /**
     * newest step; null: none reported
     */
    step: number | null;
    /**
     * seconds of a step; null: not known
     */
    stepSeconds: number | null;
  }[];
  /**
   * number of ranks that differ
   */
  differentCount: number;
  /**
   * latest events of the job, the oldest first
   */
  events: {
    /**
     * number of times that the event came
     */
    count: number;
    /**
     * message for people
     */
    message: string;
    /**
     * reason in one word
     */
    reason: string;
    /**
     * time of the event
     */
    time: string;
    /**
     * Normal or Warning
     */
    type: string;
  }[];
  /**
   * pods of the last fault
   */
  faultyPods: string[];
  /**
   * partition of the job's time
   */
  goodput: {
    /**
     * incidents after which it is not known when training resumed
     */
    incidentsOfUnknownCost: number;
    /**
     * seconds lost by class of fault
     */
    lostSeconds: {};
    /**
     * steps that have to be repeated; null: not known
     */
    lostSteps: number | null;
    /**
     * seconds that made progress
     */
    productiveSeconds: number;
    /**
     * share of productive time, 0 to 1; null: not known
     */
    share: number | null;
    /**
     * seconds before the first progress
     */
    startupSeconds: number;
    /**
     * seconds of suspension, not part of the total
     */
    suspendedSeconds: number;
    /**
     * seconds of active time
     */
    totalSeconds: number;
  };
  /**
   * ranks as columns with an entry for each cell; null: no rank is watched
   */
  heatMap: {
    /**
     * alarms of the cell
     */
    alarms: number[];
    /**
     * steps from there to the newest step of the job
     */
    behind: (number | null)[];
    /**
     * newest step of any rank; null: none reports steps
     */
    newestStep: number | null;
    /**
     * phase of the cell that the fewest ranks of the job are in
     */
    phases: string[];
    /**
     * number of ranks
     */
    ranks: number;
    /**
     * neighbouring ranks that a cell stands for
     */
    ranksPerCell: number;
    /**
     * ranks of the cell that an agent reports
     */
    reported: number[];
    /**
     * longest silence in seconds
     */
    silenceSeconds: (number | null)[];
    /**
     * largest silence as a share of the usual one
     */
    silenceShares: (number | null)[];
    /**
     * longest seconds of a step
     */
    stepSeconds: (number | null)[];
    /**
     * lowest step of the cell
     */
    steps: (number | null)[];
    /**
     * steps between ranks that count as equal
     */
    stepsApart: number;
  } | null;
  /**
   * training so far, as columns of equal length
   */
  history: {
    /**
     * metrics that the ranks report, at most 4
     */
    metricNames: string[];
    /**
     * a column for each metric
     */
    metricValues: (number | null)[][];
    /**
     * steps per second; null: not known
     */
    rates: (number | null)[];
    /**
     * newest step of any rank; null: not known
     */
    steps: (number | null)[];
    /**
     * seconds since the epoch
     */
    times: number[];
  };
  /**
   * number of incidents
   */
  incidentCount: number;
  /**
   * newest incidents, the oldest first
   */
  incidents: {
    /**
     * attempt that broke
     */
    attempt: number;
    /**
     * time of the first sign, in seconds since the epoch
     */
    began: number;
    /**
     * cost in words
     */
    cost: string;
    /**
     * rank, pod or node that failed
     */
    culprit: string;
    /**
     * class of the fault
     */
    fault: string;
    /**
     * number of the incident
     */
    number: number;
    /**
     * recovered, or why not; empty: open
     */
    outcome: string;
    /**
     * remedy
     */
    remedy: string;
    /**
     * stages of the recovery in order
     */
    stages: {
      /**
       * its start, in seconds after the first sign
       */
      from: number;
      /**
       * name of the stage
       */
      stage: string;
      /**
       * its end
       */
      to: number;
    }[];
    /**
     * the incident in one line
     */
    summary: string;
  }[];
  /**
   * class of the last fault; empty: none
   */
  lastFault: string;
  /**
   * message for people
   */
  message: string;
  /**
   * what Kubernetes has refused to show to the account of the page
   */
  missing: string[];
  /**
   * name
   */
  name: string;
  /**
   * namespace
   */
  namespace: string;
  /**
   * time of the contents
   */
  now: string;
  /**
   * parts of the job's time, which add up to the total
   */
  parts: {
    /**
     * name of the part
     */
    part: string;
    /**
     * seconds of the part
     */
    partSeconds: number;
  }[];
  /**
   * number of pods; at most 64 are listed, those that differ from most first
   */
  podCount: number;
  /**
   * pods of the job
   */
  pods: {
    /**
     * state of the agent; empty: it does not answer
     */
    agentState: string;
    /**
     * attempt that the agent runs; null: none
     */
    attempt: number | null;
    /**
     * name
     */
    name: string;
    /**
     * node; empty: none yet
     */
    node: string;
    /**
     * phase of the pod
     */
    phase: string;
    /**
     * reason in one word
     */
    reason: string;
    /**
     * number of restarts
     */
    restarts: number;
    /**
     * workers of the pod; null: its agent does not answer
     */
    workers: number | null;
  }[];
  /**
   * pods that train and are ready
   */
  ready: number;
  /**
   * reason in one word
   */
  reason: string;
  /**
   * pods that train
   */
  replicas: number;
  /**
   * time at which the agents were asked for the state of the ranks
   */
  reported: string;
  /**
   * number of restarts
   */
  restarts: number;
  /**
   * snapshots in memory, by name; empty: none, or no agent answers
   */
  snapshots: {
    /**
     * size, cost and copies in words
     */
    lines: string[];
    /**
     * what each kind of loss would cost now
     */
    losses: {
      /**
       * what is lost
       */
      lost: string;
      /**
       * where the state would come from
       */
      sourceText: string;
      /**
       * steps to make again; none: no step
       */
      stepsText: string;
    }[];
    /**
     * name of the snapshots
     */
    name: string;
  }[];
  /**
   * spare pods
   */
  spares: number;
  /**
   * time of the start; null: not started
   */
  started: string | null;
  /**
   * state
   */
  state: string;
  /**
   * newest step of any rank; null: not known
   */
  step: number | null;
  /**
   * steps per second of the last 10 s; null: not known
   */
  stepsPerSecond: number | null;
  /**
   * uid of the job, for orders about it
   */
  uid: string;
  /**
   * why no agent is asked; empty: agents are asked
   */
  unreached: string;
  /**
   * what the job waits for
   */
  waiting: string[];
  /**
   * how soon a hang of which ranks is detected
   */
  watch: string[];
  /**
   * ranks of the job; null: not known
   */
  worldSize: number | null;
}

export interface IncidentPage {
  /**
   * other symptoms
   */
  alsoSeen: string[];
  /**
   * why this rank is the culprit; empty: what happened says it
   */
  because: string;
  /**
   * cost in words
   */
  cost: string;
  /**
   * rank, pod or node that failed
   */
  culprit: string;
  /**
   * lines of the culprit's traceback or log that no stack repeats
   */
  evidence: string[];
  /**
   * the incident, and its cost
   */
  incident: IncidentPageIncident;
  /**
   * name of the job
   */
  job: string;
  /**
   * namespace
   */
  namespace: string;
  /**
   * numbers of all incidents of the job
   */
  numbers: number[];
  /**
   * remedy in words
   */
  plan: string;
  /**
   * incident in a line
   */
  summary: string;
  /**
   * stages of the recovery in order of time
   */
  timeline: {
    /**
     * pod that reached it last; empty: not known
     */
    lastPod: string;
    /**
     * seconds since the detection
     */
    sinceDetection: number;
    /**
     * name of the stage
     */
    stage: string;
    /**
     * time at which it was reached
     */
    time: string;
  }[];
  /**
   * what happened to the culprit
   */
  what: string;
}
export interface IncidentPageIncident {
  /**
   * Number of the incident within the job, from 1.
   */
  number: number;
  /**
   * Number of the attempt that failed.
   */
  attempt: number;
  /**
   * The first cause.
   */
  culprit: {
    /**
     * When it was seen.
     */
    at: string;
    /**
     * Class of the fault.
     */
    fault: string;
    /**
     * What was seen.
     */
    text: string;
    /**
     * The pod that it was seen in.
     */
    pod?: string;
    /**
     * The node that it was seen on.
     */
    node?: string;
    /**
     * The rank. Absent: the whole pod or node.
     */
    rank?: number;
    /**
     * Last lines of the traceback or the log.
     */
    evidence?: string[];
    /**
     * Exit code of the worker; 128 + N if signal N ended it.
     */
    exitCode?: number;
    /**
     * Identity of an exception: equal for the same exception at the same place.
     */
    fingerprint?: string;
    /**
     * Newest step that the rank had reported.
     */
    step?: number;
    /**
     * Name of the log rule that was broken. Absent: none was.
     */
    rule?: string;
    /**
     * How the log rule was broken: Hang, Slow or Fault.
     */
    violation?: string;
  };
  /**
   * All signs of the fault, in order of time.
   */
  signals: {
    /**
     * When it was seen.
     */
    at: string;
    /**
     * Class of the fault.
     */
    fault: string;
    /**
     * What was seen.
     */
    text: string;
    /**
     * The pod that it was seen in.
     */
    pod?: string;
    /**
     * The node that it was seen on.
     */
    node?: string;
    /**
     * The rank. Absent: the whole pod or node.
     */
    rank?: number;
    /**
     * Last lines of the traceback or the log.
     */
    evidence?: string[];
    /**
     * Exit code of the worker; 128 + N if signal N ended it.
     */
    exitCode?: number;
    /**
     * Identity of an exception: equal for the same exception at the same place.
     */
    fingerprint?: string;
    /**
     * Newest step that the rank had reported.
     */
    step?: number;
    /**
     * Name of the log rule that was broken. Absent: none was.
     */
    rule?: string;
    /**
     * How the log rule was broken: Hang, Slow or Fault.
     */
    violation?: string;
  }[];
  /**
   * Level of recovery: in-process, process, pod or job.
   */
  remedy: "in-process" | "process" | "pod" | "job" | "fail";
  /**
   * Why this remedy was chosen.
   */
  reason: string;
  /**
   * When the first sign was seen.
   */
  detectedAt: string;
  /**
   * When the last worker of the attempt had ended.
   */
  stoppedAt?: string;
  /**
   * When every agent was ready to start.
   */
  readyAt?: string;
  /**
   * When all ranks had been examined, before anything was stopped.
   */
  examinedAt?: string;
  /**
   * When every agent ran the next attempt.
   */
  startedAt?: string;
  /**
   * When a worker of the next attempt first wrote something.
   */
  firstOutputAt?: string;
  /**
   * When training resumed: the first step, or the first line of a kind that recurred in training; absent: not known.
   */
  progressAt?: string;
  /**
   * When the incident was closed.
   */
  endedAt?: string;
  /**
   * Fault of the culprit, as the condition of the job names it.
   */
  fault?: string;
  /**
   * recovered, or why not. Empty while the incident is open.
   */
  outcome?: string;
  /**
   * How sure the culprit is: certain, likely or unsure.
   */
  confidence?: string;
  /**
   * Why this rank is the culprit.
   */
  blame?: string;
  /**
   * What the ranks were doing, the outliers first.
   */
  groups?: {
    /**
     * The ranks, as ranges.
     */
    ranks: string;
    /**
     * Number of ranks.
     */
    count: number;
    /**
     * What the ranks did.
     */
    doing: string;
    /**
     * Stack of the main thread, innermost frame first.
     */
    stack?: string[];
    /**
     * Whether the others waited for them.
     */
    isOutlier?: boolean;
  }[];
  /**
   * The last sign of progress before the fault.
   */
  progressBefore?: string;
  /**
   * Newest step before the fault.
   */
  step?: number;
  /**
   * First step of the next attempt.
   */
  resumedStep?: number;
  /**
   * Seconds of a step before the fault.
   */
  stepSeconds?: number;
  /**
   * Number of ranks that kept their process. Absent: none.
   */
  kept?: number;
  /**
   * The pod that each stage waited for last: stopped, ready, started.
   */
  slowest?: {
    [k: string]: string;
  };
  /**
   * State that the ranks of the next attempt restored.
   */
  restored?: {
    /**
     * The ranks, as ranges.
     */
    ranks: string;
    /**
     * Number of ranks.
     */
    count: number;
    /**
     * Step after which the state was saved.
     */
    step: number;
    /**
     * Where the state came from: memory, buddy and its node rank, replica and its rank, or disk.
     */
    source: string;
    /**
     * Seconds of the slowest rank.
     */
    seconds: number;
    /**
     * The slowest rank.
     */
    slowest: number;
    /**
     * Checksum of the state.
     */
    checksum?: string;
    /**
     * Name of the snapshot.
     */
    name?: string;
    /**
     * Attempt in which it was saved.
     */
    savedAttempt?: number;
  }[];
  /**
   * Steps between the newest step before the fault and the restored step.
   */
  stepsLost?: number;
  /**
   * Samples used again, over all ranks. Absent: not known.
   */
  samplesRepeated?: number;
  /**
   * Samples that the restored state has never seen. Absent: not known.
   */
  samplesSkipped?: number;
  /**
   * Whether replicas restored the same bytes. Absent: not known.
   */
  replicasAgree?: boolean;
  /**
   * What was restored, in a sentence.
   */
  resumed?: string;
}

export interface NodesPage {
  /**
   * links between nodes that checks of the last day have measured
   */
  links: {
    /**
     * nodes whose links were measured
     */
    linkNodeCount: number;
    /**
     * nodes of the matrix: at most 64, those with the slowest links
     */
    linkNodes: string[];
    /**
     * pairs that were measured
     */
    pairCount: number;
    /**
     * pairs, the slowest first; at most 100
     */
    pairs: {
      /**
       * GB/s, the lower one of both ends; 0: no connection
       */
      gigabytesPerSecond: number;
      /**
       * the two nodes have computed a sum, and it was correct
       */
      isRight: boolean;
      /**
       * latency, the higher one of both ends; null: not measured
       */
      microseconds: number | null;
      /**
       * a node
       */
      one: string;
      /**
       * the other node
       */
      other: string;
      /**
       * device whose link is slower than the others; empty: none
       */
      slowDevice: string;
    }[];
    /**
     * GB/s of each pair by linkNodes; null: not measured; 0: no connection
     */
    speeds: (number | null)[][];
  };
  /**
   * what Kubernetes has refused to show to the account of the page
   */
  missing: string[];
  /**
   * nodes
   */
  nodes: {
    /**
     * action that the node daemon advises; empty: none
     */
    advice: string;
    /**
     * boot ID of the node
     */
    bootId: string;
    /**
     * cluster of the node; empty: none
     */
    cluster: string;
    /**
     * label of the deep check; empty: none
     */
    deepHealthCheck: string;
    /**
     * reasons of the node's faults; empty: none
     */
    faultReasons: string;
    /**
     * types of the node's faults; empty: none
     */
    faultTypes: string;
    /**
     * conditions of the node that are faults
     */
    faults: string[];
    /**
     * health label of the node; empty: none
     */
    health: string;
    /**
     * instance group of the node; empty: none
     */
    instanceGroup: string;
    /**
     * instance type of the node; empty: none
     */
    instanceType: string;
    /**
     * pods of jobs on the node, NAMESPACE/NAME
     */
    jobPods: string[];
    /**
     * name
     */
    name: string;
    /**
     * repair that was ordered; empty: none
     */
    ordered: string;
    /**
     * reason of the quarantine; null: not in quarantine
     */
    quarantined: string | null;
    /**
     * true if the node is ready
     */
    ready: boolean;
    /**
     * repair that runs; null: none
     */
    repair: {} | null;
    /**
     * current repair in a sentence; empty: none
     */
    repairNow: string;
    /**
     * current repair in short; `-`: none
     */
    repairText: string;
    /**
     * earlier repairs, the newest first
     */
    repairs: string[];
    /**
     * true if the node takes new pods
     */
    schedulable: boolean;
    /**
     * blame score
     */
    score: number;
    /**
     * blame score, and the limit for quarantine
     */
    scoreText: string;
    /**
     * status of the node in words
     */
    status: string;
    /**
     * result of the test after the last repair; empty: none
     */
    verified: string;
  }[];
}

export interface NodePage {
  /**
   * action that the node daemon advises; empty: none
   */
  advice: string;
  /**
   * evidence against the node, the newest first
   */
  blame: {
    /**
     * time of the evidence
     */
    blamedAt: string;
    /**
     * fault, incident, check, lost or relapse
     */
    kind: string;
    /**
     * points that it counts now
     */
    points: number;
    /**
     * reason of the fault, incident, or name of the check
     */
    source: string;
    /**
     * evidence in a line
     */
    text: string;
  }[];
  /**
   * boot ID of the node
   */
  bootId: string;
  /**
   * checks of the last day of the node, the newest first; at most 10
   */
  checks: {
    /**
     * name of the check
     */
    check: string;
    /**
     * time of its start
     */
    checkStarted: string | null;
    /**
     * its result in a line
     */
    message: string;
    /**
     * phase of the check
     */
    phase: string;
    /**
     * results of this node
     */
    resultCount: number;
    /**
     * results of this node, failures first; at most 50
     */
    results: {
      /**
       * limit that it was compared with; null: none
       */
      expected: number | null;
      /**
       * measured value; null: none
       */
      measured: number | null;
      /**
       * pass, fail, unknown or skipped
       */
      outcome: string;
      /**
       * other node of a pair; empty: none
       */
      peer: string;
      /**
       * name of the test
       */
      test: string;
      /**
       * result in words
       */
      text: string;
      /**
       * unit of both
       */
      unit: string;
    }[];
  }[];
  /**
   * cluster of the node; empty: none
   */
  cluster: string;
  /**
   * label of the deep check; empty: none
   */
  deepHealthCheck: string;
  /**
   * reasons of the node's faults; empty: none
   */
  faultReasons: string;
  /**
   * types of the node's faults; empty: none
   */
  faultTypes: string;
  /**
   * conditions of the node that are faults
   */
  faults: string[];
  /**
   * the worst of the node's GPUs over time, as columns of equal length
   */
  gpuCharts: {
    /**
     * a column for each title; null: not known
     */
    columns: (number | null)[][];
    /**
     * seconds since the epoch
     */
    times: number[];
    /**
     * value of each column
     */
    titles: string[];
  };
  /**
   * why there are no values of GPUs; empty: there are
   */
  gpuNote: string;
  /**
   * GPUs of the node now
   */
  gpus: {
    /**
     * percentage of time in which it was busy; null: not known
     */
    busyPercent: number | null;
    /**
     * temperature in degrees Celsius; null: not known
     */
    celsius: number | null;
    /**
     * corrected memory errors since the driver's start; null: not known
     */
    correctedErrors: number | null;
    /**
     * number of the GPU
     */
    gpu: string;
    /**
     * `NAMESPACE/NAME` of the pod that has it; empty: none, or not known
     */
    gpuPod: string;
    /**
     * latest XID since the daemon began; 0: none; null: not known
     */
    latestXid: number | null;
    /**
     * model
     */
    model: string;
    /**
     * uncorrected memory errors since then; null: not known
     */
    uncorrectedErrors: number | null;
    /**
     * used memory in MiB; null: not known
     */
    usedMebibytes: number | null;
    /**
     * memory in MiB; null: not known
     */
    wholeMebibytes: number | null;
  }[];
  /**
   * health label of the node; empty: none
   */
  health: string;
  /**
   * instance group of the node; empty: none
   */
  instanceGroup: string;
  /**
   * instance type of the node; empty: none
   */
  instanceType: string;
  /**
   * pods of jobs on the node, NAMESPACE/NAME
   */
  jobPods: string[];
  /**
   * use of the machine over time, as columns of equal length
   */
  machineCharts: {
    /**
     * a column for each title; null: not known
     */
    columns: (number | null)[][];
    /**
     * seconds since the epoch
     */
    times: number[];
    /**
     * value of each column
     */
    titles: string[];
  };
  /**
   * whose values those of the machine are; empty: there are none
   */
  machineNote: string;
  /**
   * what Kubernetes has refused to show to the account of the page
   */
  missing: string[];
  /**
   * name
   */
  name: string;
  /**
   * repair that was ordered; empty: none
   */
  ordered: string;
  /**
   * reason of the quarantine; null: not in quarantine
   */
  quarantined: string | null;
  /**
   * the node is ready
   */
  ready: boolean;
  /**
   * repair that runs; null: none
   */
  repair: {} | null;
  /**
   * current repair in a sentence; empty: none
   */
  repairNow: string;
  /**
   * current repair in short; `-`: none
   */
  repairText: string;
  /**
   * earlier repairs, the newest first
   */
  repairs: string[];
  /**
   * true if the node takes new pods
   */
  schedulable: boolean;
  /**
   * blame score
   */
  score: number;
  /**
   * blame score, and the limit for quarantine
   */
  scoreText: string;
  /**
   * status of the node in words
   */
  status: string;
  /**
   * result of the test after the last repair; empty: none
   */
  verified: string;
}

export interface LogsPage {
  /**
   * lines of the logs, the oldest first; at most 500
   */
  lines: {
    /**
     * time of the line, in seconds since the epoch
     */
    at: number;
    /**
     * characters at its end that are left out
     */
    cut: number;
    /**
     * name of the pod; null: not known
     */
    pod: string | null;
    /**
     * rank that wrote it; null: an agent, or the rank is not known
     */
    rank: number | null;
    /**
     * the line, with control characters as visible escapes
     */
    text: string;
  }[];
  /**
   * what was not read, and why
   */
  notes: string[];
  /**
   * time before which older lines are; null: there are none
   */
  older: number | null;
  /**
   * time of the answer, in seconds since the epoch
   */
  until: number;
}

export interface ActionsPage {
  /**
   * actions that the account of the page may take
   */
  actions: {
    /**
     * name of the action, as an order has it
     */
    action: string;
    /**
     * command that does the same, without its last argument
     */
    command: string;
    /**
     * what will happen, in the words of the command's help
     */
    words: string;
  }[];
}

export interface DashboardPage {
  /**
   * address of the Prometheus that was asked
   */
  address: string;
  /**
   * all dashboards
   */
  boards: {
    /**
     * name of the dashboard in addresses
     */
    name: string;
    /**
     * title of the dashboard
     */
    title: string;
  }[];
  /**
   * name of the dashboard in addresses
   */
  name: string;
  /**
   * panels of the dashboard
   */
  panels: {
    /**
     * further series, which have lower values
     */
    hidden: number;
    /**
     * timeseries, stat, bargauge or piechart
     */
    kind: string;
    /**
     * why there is no data; empty: the query was answered
     */
    problem: string;
    /**
     * series; at most 20
     */
    series: {
      /**
       * name by the labels of the series
       */
      name: string;
      /**
       * newest value
       */
      newest: number;
      /**
       * values at the times; null: a gap
       */
      values: (number | null)[];
    }[];
    /**
     * title of the panel
     */
    title: string;
    /**
     * unit by Grafana's identifier
     */
    unit: string;
    /**
     * columns of 24 that the panel takes in Grafana
     */
    width: number;
  }[];
  /**
   * time that is shown
   */
  span: string;
  /**
   * times that can be shown
   */
  spans: string[];
  /**
   * times of the points, in seconds since the epoch
   */
  times: number[];
  /**
   * title of the dashboard
   */
  title: string;
}
