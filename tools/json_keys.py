"""Types and meanings of the keys that commands print with `-o json`.

A key is looked up as `COMMAND:PATH`, then as PATH, then as the last name of the path.  Types are
those of JSON Schema, `time` for a text in RFC 3339, and `[]` after them for a list; `?` adds null.
"""

from __future__ import annotations

TYPES = {
    "text": {"type": "string"},
    "time": {"type": "string", "format": "date-time"},
    "integer": {"type": "integer"},
    "integer or string": {"type": ["integer", "string"]},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "object": {"type": "object"},
}

_TABLE = """
API Version | text | API version of the job
AcceleratorDevicesAvailable | integer or string | accelerators that are free; N/A: there are none
Annotations | object? | annotations of the job
Cluster | text | name of the cluster
Creation Time | time | time of creation
Creation Timestamp | time | time of creation
DeepHealthCheckStatus=Passed | integer or string | nodes that passed; N/A: no deep check
Generation | integer | generation of the job's spec
InstanceType | text | instance type
Kind | text | kind of the job
Label | object? | labels of the job
Metadata | object | metadata of the job, with --verbose
Name | text | name of the job
Namespace | text | namespace of the job
NodeHealthStatus=Schedulable | integer | nodes that take pods
Pod Name | text | name of the pod
Resource Version | text | resource version of the job
Spec | object | spec of the job, with --verbose
State | text? | state of the job
coldBecause | text | why the next start of the workers is cold; empty: it is warm
leftOut | text[] | modules that each warm worker imports itself, with the reason
modules | integer | modules that a warm worker finds imported
describe:pods[].agent.warm.seconds | number | seconds that these imports took; 0: not known
hyperpod get-job:Status | object? | status of the job, as Kubernetes has it
Status | text? | phase of the pod
TotalNodes | integer | nodes of the type
UID | text | UID of the job
action | text | action for the fault
address | text | IP address of the pod; empty: none yet
advice | text | action that the node daemon advises; empty: none
afterRepair | text? | action if the fault is back after the repair; null: the fault is not repaired
agentProof | text | `proven`, `unproven`, or empty: no attempt has started, or the job has no key
pods[].agent | object? | report of the pod's agent; null: it does not answer
attempt | integer? | number of the attempt, from 0; null: none yet
beside | object[] | other actions, if another XID came with it
blame | object[] | blame entries of the node
bootId | text | boot ID of the node
burnIn | text? | state of the burn-in at its end; null: none was awaited
by | text | kind of file that names the cause
causes | object[] | causes by the files, the most certain first
class | text | class of the fault
cleared | text | who cleared the blame, and why
cluster | text | cluster of the node; empty: none
clusterApi | text? | address of the cluster API; null: not served
clusterApiCredentials | object? | key of the cluster API; null: it cannot be read
completed | time? | time of the end; null: not ended
condition | text? | condition of the Node; null: none is set
conditions | object[] | conditions of the job, as Kubernetes has them
confidence | text | certain, likely or unsure; empty: no culprit
count | integer | number of times that the event came
cpu | text? | CPUs of the node, a quantity of Kubernetes
created | time | time of creation
culprit | text | rank, pod or node that failed
culprits | integer[] | ranks that kept the others waiting
deadline | text? | time after which jobs leave in any case; null: none
decidedAt | time | time of the decision
deepHealthCheck | text | label of the deep check; empty: none
description | text | description of the process group
detectedAt | time | time of the first sign
detector | text | name of the detector
detectors | object[] | detectors of the job
directory | text | folder of the cluster
done | text | what was done
dumps | integer[] | ranks with a flight recorder dump
engine | text | engine that evaluates the pattern
events | object[] | latest events of the job, the oldest first
exitCode | integer | exit code of the job
fault | text | class of the fault
faultReasons | text | reasons of the node's faults; empty: none
faultTypes | text | types of the node's faults; empty: none
faultyPods | text[] | pods of the last fault
file | text | path of the file
findings | object[] | what was found
fired | object[] | rules that fired
goodput | object | partition of the job's time
gpu | text | GPUs of the node
groups | object[] | groups of ranks
health | text | health label of the node; empty: none
ifSilentFromHere | object[] | rules that would fire if no rank logged again
incidents | object[] | incidents, the oldest first
incidentsOfUnknownCost | integer | incidents after which it is not known when training resumed
instanceGroup | text | instance group of the node; empty: none
instanceType | text | instance type of the node; empty: none
instead | text | what to write instead
isWell | boolean | true if no fault was found
isWorking | boolean | true if the job makes progress
job | text | name of the job
jobPods | text[] | pods of jobs on the node, NAMESPACE/NAME
jobs | object[] | jobs
kind | text | kind
kinds | text[] | kinds of tests
knownBy | text | how the ranks of the dumps are known
kubeconfig | text | path of the kubeconfig
lastCalled | object | number of the last collective that each rank called
lastFault | text | class of the last fault; empty: none
lastLoss | object? | last loss; null: none
lines | object[] | lines of output
rules test:attempts[].lines | integer | lines that were read
linesPerSecond | integer | lines that the pattern reads in a second
localRank | integer | local rank, from 0
logRules | object[] | log rules of the pod's agent
logs | integer[] | ranks with a log
losses | object[] | losses, the oldest first
lostSeconds | object | seconds lost by class of fault
lostSteps | integer? | steps that have to be repeated; null: not known
means | text | what the detector looks for
memory | text? | memory of the node, a quantity of Kubernetes
message | text | message for people
status:ui | text | address of the live page; empty: not served
metrics | text? | address of the metrics; null: not served
mode | text | off, shadow, warn or act
name | text | name
namespace | text | namespace
nanosecondsPerLine | integer | nanoseconds that the pattern takes for a line
node | text | node; empty: none yet
nodeRank | integer? | rank of the pod, from 0; null: none yet
nodes | object[] | nodes
check:nodes | text[] | names of the nodes
notRead | object[] | files that were not read
notes | text[] | notes for people
number | integer | number of the incident, from 1; 0: the job was not restarted
ordered | text | repair that was ordered; empty: none
outcome | text | recovered, or why not; empty: still open
part | text | part of the node, such as a GPU
path | text | path of the field
pattern | text | logPattern or stopPattern
phase | text | phase of the pod
pid | integer? | process ID; null: not known
pod | text? | name of the pod; null: not known
pods | object[] | pods of the job
status:nodes[].pods | integer | pods on the node
nodes drain:nodes[].pods | text[]? | pods of jobs that are still there; null: not awaited
points | number | points of the entry, halved every week
productiveSeconds | number | seconds that made progress
quarantined | text? | reason of the quarantine; null: not in quarantine
ranAgainAt | time? | time at which the job ran again; null: not yet
rank | integer? | rank in the job, from 0; null: none
ranks | object[] | ranks of the job
blame:ranks | object | ranks of the files
blame:causes[].ranks | integer[] | ranks of the cause
blame:groups[].ranks | integer[] | ranks of the group
rules test:attempts[].ranks | integer[] | ranks of the logs
pods[].ready | boolean | true if the pod is ready
nodes[].ready | boolean | true if the node is ready
nodes describe:ready | boolean | true if the node is ready
ready | integer | pods that train and are ready
reason | text | reason in one word
record | object | spec of the node's NodeRecord
redoSeconds | number | seconds that repeating the lost steps takes, at the pace before
remedy | text | remedy
repair | object? | repair that runs; null: none
repeats | object? | action if the fault repeats; null: none
replacement | text | node that replaces it; empty: none
replicas | integer | pods that train
restart | integer | number of the restart; 0: the job was not restarted
restarts | integer | number of restarts
restartsMax | integer | restarts that are allowed
results | object[] | results of the tests
resumed | object[] | jobs of other kinds with auto-resume
right | integer | right alarms on this job
rule | text | name of the rule
rules | object[] | what each rule has seen
running | boolean | true if the cluster runs
schedulable | boolean | true if the node takes new pods
score | number | blame score
seconds | number? | seconds until training resumed; null: not yet, or not known
severity | text | error, warning or note
share | number? | share of productive time, 0 to 1; null: not known
silentPods | text[] | pods whose agent did not answer
since | number | time of the start, in seconds since the epoch
source | text | source of the entry
spares | integer | spare pods
stacks | integer[] | ranks with a stack
start | text | how the worker was started
startAt | number | time of the first line, in seconds since the epoch
rules test:attempts[].seconds | number | seconds from the first line to the end
started | time? | time of the start; null: not started
startupSeconds | number | seconds before the first progress
state | text | state
summary | text | the incident in one line
suspendedSeconds | number | seconds of suspension, not part of the total
symptom | text | symptom of the fault
table | text? | file that set the entry; null: the table of unbroken
text | text | text
time | time | time of the event
times | integer | number of faults
title | text | title of the fault
totalSeconds | number | seconds of active time
type | text | Normal or Warning
uncordoned | text[] | names of the nodes
unknown | object | parts that were not checked, and why
url | text | address of the Kubernetes API
verified | text | result of the test after the last repair; empty: none
waiting | text[] | what the job waits for
waits | object[] | operations that ranks wait in
warm | object? | how the workers start next; null: always cold, or no start so far
wasQuarantined | boolean | true if the node was in quarantine
watch | object[] | what the watchdog of each rank sees
what | text | what is wrong
why | text | why
withinSeconds | number | seconds within which the faults count together
withoutDump | integer[] | ranks without a dump
workers | object[] | workers of the agent
wrong | integer | wrong alarms on this job
xid | integer | number of the XID
missing | text[] | what Kubernetes has refused to show to the account of the page
page logs:lines | object[] | lines of the logs, the oldest first; at most 500
page logs:lines[].at | number | time of the line, in seconds since the epoch
page logs:lines[].rank | integer? | rank that wrote it; null: an agent, or the rank is not known
page logs:lines[].text | text | the line, with control characters as visible escapes
page logs:lines[].cut | integer | characters at its end that are left out
page logs:older | number? | time before which older lines are; null: there are none
page logs:until | number | time of the answer, in seconds since the epoch
page logs:notes | text[] | what was not read, and why
page actions:actions | object[] | actions that the account of the page may take
page actions:actions[].action | text | name of the action, as an order has it
page actions:actions[].command | text | command that does the same, without its last argument
page actions:actions[].words | text | what will happen, in the words of the command's help
unreached | text | why no agent is asked; empty: agents are asked
page jobs:jobs[].worldSize | integer? | ranks of the job; null: not known
page job:uid | text | uid of the job, for orders about it
page job:worldSize | integer? | ranks of the job; null: not known
page jobs:jobs[].step | integer? | newest step of any rank; null: not known
page job:step | integer? | newest step of any rank; null: not known
stepsPerSecond | number? | steps per second of the last 10 s; null: not known
page jobs:jobs[].goodput | object | partition of the job's time
snapshots | object[] | snapshots in memory, by name; empty: none, or no agent answers
snapshots[].name | text | name of the snapshots
snapshots[].rankCount | integer | ranks that have saved in this attempt
snapshots[].stateBytes | integer | bytes of the state of a rank, the largest one
snapshots[].step | integer | newest step that is in the memory of all ranks
snapshots[].saveSeconds | number? | seconds that training waits for a save (median); null: not known
snapshots[].bytesPerSecond | number? | rate of copies of the slowest pod; null: none was sent
snapshots[].memoryBytes | integer | memory that snapshots take in a pod, at most
snapshots[].replicas | text[] | groups of ranks that hold the same state, at most 8
snapshots[].copies | object[] | where the copies of each pod's ranks are
snapshots[].copies[].pod | text | name of the pod
snapshots[].copies[].node | text | name of its node
snapshots[].copies[].buddy | text | pod that keeps the copies; empty: none
snapshots[].copies[].buddyStep | integer? | newest step that it has of all ranks; null: none
snapshots[].copies[].stepsBehind | integer? | steps from there to the newest snapshot; null: none
snapshots[].losses | object[] | what each kind of loss would cost now
snapshots[].losses[].loss | text | `worker`, `rank 0`, `node` or `node and its buddy`
snapshots[].losses[].source | text | `memory`, `replica`, `buddy`, `checkpoint` or `nothing`
snapshots[].losses[].resumeStep | integer? | step before the next one; null: training begins anew
shortages | object[] | pods whose memory has no room for snapshots or copies of all their ranks
shortages[].pod | text | name of the pod
shortages[].node | text | name of its node
shortages[].missingBytes | integer | memory that is missing for snapshots; 0: none, they are kept
shortages[].copiesMissingBytes | integer | memory that is missing for copies; 0: none, they are kept
snapshots[].lines | text[] | size, cost and copies in words
snapshots[].losses[].lost | text | what is lost
snapshots[].losses[].stepsText | text | steps to make again; none: no step
snapshots[].losses[].sourceText | text | where the state would come from
snapshots[].losses[].stepsRepeated | integer | steps to make again
now | time | time of the contents
reported | time | time at which the agents were asked for the state of the ranks
parts | object[] | parts of the job's time, which add up to the total
parts[].part | text | name of the part
parts[].partSeconds | number | seconds of the part
history | object | training so far, as columns of equal length
history.times | number[] | seconds since the epoch
history.steps | integer?[] | newest step of any rank; null: not known
history.rates | number?[] | steps per second; null: not known
history.metricNames | text[] | metrics that the ranks report, at most 4
history.metricValues | number?[][] | a column for each metric
heatMap | object? | ranks as columns with an entry for each cell; null: no rank is watched
heatMap.ranks | integer | number of ranks
heatMap.ranksPerCell | integer | neighbouring ranks that a cell stands for
heatMap.newestStep | integer? | newest step of any rank; null: none reports steps
heatMap.stepsApart | integer | steps between ranks that count as equal
heatMap.reported | integer[] | ranks of the cell that an agent reports
heatMap.steps | integer?[] | lowest step of the cell
heatMap.behind | integer?[] | steps from there to the newest step of the job
heatMap.stepSeconds | number?[] | longest seconds of a step
heatMap.silenceSeconds | number?[] | longest silence in seconds
heatMap.silenceShares | number?[] | largest silence as a share of the usual one
heatMap.phases | text[] | phase of the cell that the fewest ranks of the job are in
heatMap.alarms | integer[] | alarms of the cell
different | object[] | ranks that differ from the others, those with alarms first; at most 32
different[].rank | integer | rank
different[].pod | text | name of the pod
different[].phase | text | phase of training
different[].step | integer? | newest step; null: none reported
different[].stepSeconds | number? | seconds of a step; null: not known
different[].lastSign | time? | last sign of life; null: none yet
different[].allowedSeconds | number? | usual silence with a margin; null: still learning
different[].alarms | text[] | alarms
differentCount | integer | number of ranks that differ
page job:watch | text[] | how soon a hang of which ranks is detected
incidentCount | integer | number of incidents
podCount | integer | number of pods; at most 64 are listed, those that differ from most first
page job:incidents | object[] | newest incidents, the oldest first
page job:incidents[].number | integer | number of the incident
page job:incidents[].attempt | integer | attempt that broke
page job:incidents[].fault | text | class of the fault
page job:incidents[].remedy | text | remedy
page job:incidents[].began | number | time of the first sign, in seconds since the epoch
page job:incidents[].outcome | text | recovered, or why not; empty: open
page job:incidents[].cost | text | cost in words
page job:incidents[].stages | object[] | stages of the recovery in order
page job:incidents[].stages[].stage | text | name of the stage
page job:incidents[].stages[].from | number | its start, in seconds after the first sign
page job:incidents[].stages[].to | number | its end
pods[].agentState | text | state of the agent; empty: it does not answer
pods[].workers | integer? | workers of the pod; null: its agent does not answer
page job:pods[].attempt | integer? | attempt that the agent runs; null: none
page incident:job | text | name of the job
numbers | integer[] | numbers of all incidents of the job
page incident:incident | object | the incident, and its cost
page incident:summary | text | incident in a line
page incident:culprit | text | rank, pod or node that failed
because | text | why this rank is the culprit; empty: what happened says it
page incident:what | text | what happened to the culprit
evidence | text[] | lines of the culprit's traceback or log that no stack repeats
plan | text | remedy in words
cost | text | cost in words
timeline | object[] | stages of the recovery in order of time
timeline[].stage | text | name of the stage
timeline[].time | time | time at which it was reached
timeline[].sinceDetection | number | seconds since the detection
timeline[].lastPod | text | pod that reached it last; empty: not known
alsoSeen | text[] | other symptoms
status | text | status of the node in words
repairText | text | current repair in short; `-`: none
faults | text[] | conditions of the node that are faults
repairNow | text | current repair in a sentence; empty: none
repairs | text[] | earlier repairs, the newest first
scoreText | text | blame score, and the limit for quarantine
page node:ready | boolean | the node is ready
links | object | links between nodes that checks of the last day have measured
links.linkNodes | text[] | nodes of the matrix: at most 64, those with the slowest links
links.linkNodeCount | integer | nodes whose links were measured
links.speeds | number?[][] | GB/s of each pair by linkNodes; null: not measured; 0: no connection
links.pairCount | integer | pairs that were measured
links.pairs | object[] | pairs, the slowest first; at most 100
links.pairs[].one | text | a node
links.pairs[].other | text | the other node
links.pairs[].gigabytesPerSecond | number | GB/s, the lower one of both ends; 0: no connection
links.pairs[].microseconds | number? | latency, the higher one of both ends; null: not measured
links.pairs[].isRight | boolean | the two nodes have computed a sum, and it was correct
links.pairs[].slowDevice | text | device whose link is slower than the others; empty: none
page node:blame | object[] | evidence against the node, the newest first
page node:blame[].blamedAt | time | time of the evidence
page node:blame[].kind | text | fault, incident, check, lost or relapse
page node:blame[].source | text | reason of the fault, incident, or name of the check
page node:blame[].text | text | evidence in a line
page node:blame[].points | number | points that it counts now
page node:checks | object[] | checks of the last day of the node, the newest first; at most 10
page node:checks[].check | text | name of the check
page node:checks[].phase | text | phase of the check
page node:checks[].message | text | its result in a line
page node:checks[].checkStarted | time? | time of its start
page node:checks[].resultCount | integer | results of this node
page node:checks[].results | object[] | results of this node, failures first; at most 50
page node:checks[].results[].test | text | name of the test
page node:checks[].results[].peer | text | other node of a pair; empty: none
page node:checks[].results[].outcome | text | pass, fail, unknown or skipped
page node:checks[].results[].measured | number? | measured value; null: none
page node:checks[].results[].expected | number? | limit that it was compared with; null: none
page node:checks[].results[].unit | text | unit of both
page node:checks[].results[].text | text | result in words
gpuNote | text | why there are no values of GPUs; empty: there are
machineNote | text | whose values those of the machine are; empty: there are none
gpuCharts | object | the worst of the node's GPUs over time, as columns of equal length
machineCharts | object | use of the machine over time, as columns of equal length
page node:gpuCharts.times | number[] | seconds since the epoch
page node:gpuCharts.titles | text[] | value of each column
page node:gpuCharts.columns | number?[][] | a column for each title; null: not known
page node:machineCharts.times | number[] | seconds since the epoch
page node:machineCharts.titles | text[] | value of each column
page node:machineCharts.columns | number?[][] | a column for each title; null: not known
gpus | object[] | GPUs of the node now
gpus[].gpu | text | number of the GPU
gpus[].model | text | model
gpus[].gpuPod | text | `NAMESPACE/NAME` of the pod that has it; empty: none, or not known
gpus[].celsius | number? | temperature in degrees Celsius; null: not known
gpus[].busyPercent | number? | percentage of time in which it was busy; null: not known
gpus[].usedMebibytes | number? | used memory in MiB; null: not known
gpus[].wholeMebibytes | number? | memory in MiB; null: not known
gpus[].correctedErrors | number? | corrected memory errors since the driver's start; null: not known
gpus[].uncorrectedErrors | number? | uncorrected memory errors since then; null: not known
gpus[].latestXid | number? | latest XID since the daemon began; 0: none; null: not known
page dashboard:address | text | address of the Prometheus that was asked
page dashboard:name | text | name of the dashboard in addresses
page dashboard:title | text | title of the dashboard
page dashboard:span | text | time that is shown
page dashboard:spans | text[] | times that can be shown
page dashboard:boards | object[] | all dashboards
page dashboard:boards[].name | text | name of the dashboard in addresses
page dashboard:boards[].title | text | title of the dashboard
page dashboard:times | integer[] | times of the points, in seconds since the epoch
page dashboard:panels | object[] | panels of the dashboard
page dashboard:panels[].title | text | title of the panel
page dashboard:panels[].kind | text | timeseries, stat, bargauge or piechart
page dashboard:panels[].unit | text | unit by Grafana's identifier
page dashboard:panels[].width | integer | columns of 24 that the panel takes in Grafana
page dashboard:panels[].problem | text | why there is no data; empty: the query was answered
page dashboard:panels[].series | object[] | series; at most 20
page dashboard:panels[].series[].name | text | name by the labels of the series
page dashboard:panels[].series[].newest | number | newest value
page dashboard:panels[].series[].values | number?[] | values at the times; null: a gap
page dashboard:panels[].hidden | integer | further series, which have lower values
notification:version | integer | version of the form: 1
notification:id | text | id of the message: the same for each try, by any operator
notification:state | text | found, recovered, gave-up, ended, repair-began, repair-ended or left-out
notification:time | time | time of the state
notification:text | text | the message in a line
notification:link | text | address of the incident on the live page; empty: none
notification:leftOut | integer | notifications that were left out before this one
notification:incident | object? | the incident; null: the message is about none
notification:incident.namespace | text | namespace of the job
notification:incident.job | text | name of the job
notification:incident.number | integer | number of the incident
notification:incident.attempt | integer | attempt that broke
notification:incident.fault | text | class of the fault
notification:incident.culprit | text | rank, pod or node that failed, in words
notification:incident.rank | integer? | rank of the culprit; null: a whole pod or node
notification:incident.pod | text | pod of the culprit; empty: none
notification:incident.node | text | node of the culprit; empty: not known
notification:incident.remedy | text | remedy
notification:incident.outcome | text | recovered, or why not; empty: open
notification:incident.lostSeconds | number? | seconds that the fault has cost; null: not known yet
notification:repair | object? | the repair of a node; null: the message is about none
notification:repair.node | text | name of the node
notification:repair.action | text | reset, reboot, replace, or none for a burn-in
notification:repair.state | text | state of the repair
notification:repair.reason | text | reason of the repair
notification:repair.message | text | latest result, in words; empty: none
notification:repair.replacement | text | node that replaces it; empty: none, or not known
notification:repair.began | time | time at which the need was seen
"""

KEYS = {
    key.strip(): (kind.strip(), text.strip())
    for key, kind, text in (line.split("|") for line in _TABLE.strip().splitlines())
}


def described(command: str, path: str) -> tuple[str, str]:
    """Return the type and meaning of a key; SystemExit if the table lacks it."""
    for key in (f"{command}:{path}", path, path.rpartition(".")[2]):
        if key in KEYS:
            return KEYS[key]
    raise SystemExit(f"tools/json_keys.py has no line for the key {path} of {command}")


def schema_of(kind: str) -> dict[str, object]:
    """Return the JSON Schema of a type of the table."""
    if kind.endswith("?"):
        schema = schema_of(kind[:-1])
        return {**schema, "type": [schema["type"], "null"]}
    if kind.endswith("[]"):
        return {"type": "array", "items": schema_of(kind[:-2])}
    return dict(TYPES[kind])


def type_text(kind: str) -> str:
    """Return a type of the table in words."""
    bare = kind.removesuffix("?")
    item = bare.removesuffix("[]")
    word = {"text": "string"}.get(item, item)
    words = word if bare == item else f"list of {word}s"
    return f"{words} or null" if bare != kind else words
