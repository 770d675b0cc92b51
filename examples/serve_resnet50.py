"""A ResNet-50 behind an HTTP server on a CPU: latencies of stock PyTorch and of the converted model, side by side.

    python examples/serve_resnet50.py                         # measures first, then serves
    python examples/serve_resnet50.py --store choices.sqlite  # from the second start on, nothing is left to measure
    python examples/serve_resnet50.py --freeze                # a frozen model beside the other two
    python examples/serve_resnet50.py --quick                 # small images, few requests

Needs `pip install 'convselect[tools]'`. The weights are random; speed does not depend on them.
"""

import argparse
import copy
import http.client
import http.server
import threading
from collections import Counter

import numpy as np
import torch

import convselect
from convselect.base.timing import Deadline, interleaved, ratio
from convselect.demo.demo import built_in


class Handler(http.server.BaseHTTPRequestHandler):
    """POST /<name of a model>, an image's float32 values as the body; the logits come back in the same way."""

    protocol_version = "HTTP/1.1"  # the client keeps its connection
    disable_nagle_algorithm = True

    def do_POST(self):
        model = self.server.models[self.path.strip("/")]
        body = bytearray(self.rfile.read(int(self.headers["Content-Length"])))
        with torch.inference_mode():
            logits = model(torch.frombuffer(body, dtype=torch.float32).view(self.server.image_shape))
        answer = logits.numpy().tobytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def make_ready(stock, x, freeze):
    """The models to serve, each called once: what there is to choose has been chosen by then."""
    models = {"stock": stock, "converted": convselect.convert(copy.deepcopy(stock))}
    start = Deadline(None)
    models["converted"](x)  # under "measure" every convolution that the store does not know is timed on the way
    ready_s = start.elapsed_s
    sources = Counter(row.source for row in convselect.explain(models["converted"], x))
    print(f"converted: ready after {ready_s:.1f} s, choices by", dict(sources))
    if freeze:
        start = Deadline(None)
        # Measures at every start: what it prepares is not stored.
        models["frozen"] = convselect.freeze(convselect.convert(copy.deepcopy(stock)), x)
        print(f"frozen: ready after {start.elapsed_s:.1f} s")
    return models


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", help="a file to keep choices in; default: none")
    parser.add_argument("--freeze", action="store_true", help="also a frozen model, with folded batch normalisation")
    parser.add_argument("--requests", type=int, help="to each model; default 50")
    parser.add_argument("--quick", action="store_true", help="small images and few requests, for a test")
    args = parser.parse_args()
    requests = args.requests or (5 if args.quick else 50)

    # A server can afford to measure before it takes requests. (By default the first requests would be the trial.)
    convselect.set_defaults("measure")
    convselect.set_store(args.store or "off")

    _, stock, x = built_in("resnet50", quick=args.quick)
    x = x[:1]
    with torch.inference_mode():
        models = make_ready(stock, x, args.freeze)

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)  # one request at a time: all cores work on it
    server.models, server.image_shape = models, tuple(x.shape)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    # ---- the client -------------------------------------------------------------------------------------------------
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    image = x.numpy().tobytes()

    def ask(name):
        connection.request("POST", f"/{name}", image)
        return np.frombuffer(connection.getresponse().read(), np.float32)

    want = ask("stock")
    for name in models:
        error = np.linalg.norm(ask(name) - want) / np.linalg.norm(want)
        print(f"{name}: logits {error:.0e} from stock PyTorch's")
        assert error < 1e-3  # 50 layers of random weights amplify rounding; trained ones do so less

    timings = interleaved({name: lambda name=name: ask(name) for name in models}, requests)
    connection.close()
    server.shutdown()
    server.server_close()

    print(f"\nlatency over HTTP in ms, {requests} requests each, in random order:")
    print(f"{'':<10} {'p50':>8} {'p95':>8} {'p99':>8}   times faster")
    for name, timing in timings.items():
        p50, p95, p99 = np.percentile(timing.samples_us, (50, 95, 99)) / 1e3
        print(f"{name:<10} {p50:8.2f} {p95:8.2f} {p99:8.2f}   {ratio(timings['stock'], timing).median:.2f}")


if __name__ == "__main__":
    main()
