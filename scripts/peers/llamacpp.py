"""Benchmark adapter: llama.cpp's server over HTTP on the loopback address, one thread per request in the client.

Options: server (path of llama-server), parallel (slots), context (tokens of the shared KV cache).
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import threading
import time
from collections.abc import Sequence

from scripts.peers.protocol import Answer, Job, Request, adapter_main

_START_S = 120.0
_REQUEST_S = 1800.0


class LlamaServer:
    """A llama-server child process and streaming requests to it."""

    def __init__(self, job: Job) -> None:
        self._port = _free_port()
        self._binary = job.options["server"]
        command = [
            *(self._binary, "--model", job.model, "--host", "127.0.0.1", "--port", str(self._port)),
            *("--threads", str(job.threads), "--parallel", str(job.options["parallel"])),
            *("--ctx-size", str(job.options["context"]), "--kv-unified", "--no-webui", "--cache-ram", "0"),
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_S
        while not self._healthy():
            if self._process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self._process.returncode}: {' '.join(command)}")
            if time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"llama-server was not ready after {_START_S:.0f} s: {' '.join(command)}")
            time.sleep(0.1)

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def generate(self, requests: Sequence[Request]) -> Answer:
        began = time.perf_counter()
        token_ids: list[list[int]] = [[] for _ in requests]
        times: list[list[float]] = [[] for _ in requests]

        def run(index: int) -> None:
            for new in self._stream(requests[index]):
                token_ids[index] += new
                times[index].append(time.perf_counter() - began)

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return Answer(
            token_ids=token_ids,
            first_token_s=[row[0] if row else None for row in times],
            finish_s=[row[-1] if row else None for row in times],
        )

    def _stream(self, request: Request):
        """Yield lists of new token ids."""
        body = {
            "prompt": request.prompt_ids,
            "n_predict": request.out_len,
            "temperature": 0.0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_REQUEST_S)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"llama-server answered {response.status}: {response.read()[:500]!r}")
            for line in response:
                if line.startswith(b"data: "):
                    tokens = json.loads(line[6:]).get("tokens", [])
                    if tokens:
                        yield tokens
        finally:
            connection.close()

    def versions(self) -> dict[str, str]:
        done = subprocess.run([self._binary, "--version"], capture_output=True, text=True, check=False)
        lines = (done.stdout + done.stderr).splitlines()
        return {"llama.cpp": next((line for line in lines if line.startswith("version")), "unknown")}

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    adapter_main(LlamaServer)
