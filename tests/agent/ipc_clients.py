"""Worker scripts that speak the agent's socket by its description alone: counterparts in tests."""

from __future__ import annotations

RAW = """
import json, os, signal, socket, struct, sys, time

PATH = os.environ["HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH"]
LOCAL = int(os.environ["LOCAL_RANK"])
ID = f"client-{LOCAL}"

class Client:
    def __init__(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(PATH)
        self.unread = b""

    def say(self, kind, **more):
        body = json.dumps({"type": kind, "local_rank": LOCAL, "client_id": ID, **more}).encode()
        self.sock.sendall(struct.pack(">I", len(body)) + body)

    def take(self, count):
        while len(self.unread) < count:
            chunk = self.sock.recv(65536)
            if not chunk:
                sys.exit("the agent has gone")
            self.unread += chunk
        taken, self.unread = self.unread[:count], self.unread[count:]
        return taken

    def hear(self, *kinds):
        while True:
            (length,) = struct.unpack(">I", self.take(4))
            message = json.loads(self.take(length))
            assert message["client_id"] == ID, message
            if message["type"] in kinds:
                return message

    def introduce(self, **more):
        # What comes after is told to an agent that has heard this: its answer is the proof.
        self.say("init", restartable=True, **more)
        self.say("ckpt_info_get")
        self.hear("ckpt_info_get")

def tell(**what):
    what["pid"], what["local_rank"] = os.getpid(), LOCAL
    os.write(1, (json.dumps(what) + "\\n").encode())
"""
"""`Client`, and `tell`, which writes a line of JSON to the log."""

OURS = (
    RAW
    + """
client = Client()
client.introduce(attempt=int(os.environ["JOB_RESTART_COUNT"]))
tell(rank=os.environ["RANK"], attempt=os.environ["JOB_RESTART_COUNT"])
while True:
    fault = client.hear("job_fault")
    client.say("at_rcb_barrier")
    envs = client.hear("job_start")["worker_envs"]
    client.say("past_rcb_barrier")
    tell(rank=envs["RANK"], attempt=envs["JOB_RESTART_COUNT"], port=envs["MASTER_PORT"],
         restart_count=fault["restart_count"])
"""
)
"""Started like any other worker; leaves its training when it receives a job fault."""

THEIRS = (
    RAW
    + """
client = Client()
client.say("init")
while True:
    client.say("at_rcb_barrier")
    start = client.hear("job_start")
    envs = start["worker_envs"]
    client.say("past_rcb_barrier")
    client.say("job_data", rank=int(envs["RANK"]), data=f"data of {envs['RANK']}")
    client.say("rank_labels", labels={"pp": "0"})
    tell(before=os.environ["RANK"], **envs, more=start["aggregate_worker_data"])
    if LOCAL == 0 and envs["JOB_RESTART_COUNT"] == "1":
        client.say("job_fault", rank=int(envs["RANK"]), restart_mode="in_process_restart",
                   reason="MyReason", message="my message")
    client.hear("job_fault")
"""
)
"""Waits for its rank at the barrier, as with AWS's library; one reports a fault in attempt 1."""
