"""Renders deploy/helm/strait by Helm, and checks what comes out of it.

Helm is the library of PyPI helm-sdkpy, which needs no shell command and no cluster: it installs the
chart at a stub of an API server, which keeps what it is sent. The objects are checked as those of
deploy/kubernetes are, the default ones are compared with them, and wrong values must be refused by
name. With STRAIT_UPDATE=1 the schema of the values is written anew.
"""

import contextlib
import ctypes
import http.server
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading

import jsonschema
import yaml

import check

TOP = check.HERE.parent.parent
CHART = TOP / "deploy" / "helm" / "strait"
DASHBOARD = TOP / "deploy" / "prometheus" / "dashboard.json"
SCHEMA = CHART / "values.schema.json"

# Kinds by group and version, as the discovery of an API server lists them.
KINDS = {
    "v1": ["ConfigMap", "Secret", "Service", "ServiceAccount"],
    "apiextensions.k8s.io/v1": ["CustomResourceDefinition"],
    "apps/v1": ["Deployment"],
    "autoscaling/v2": ["HorizontalPodAutoscaler"],
    "gateway.networking.k8s.io/v1": ["Gateway"],
    "monitoring.coreos.com/v1": ["PodMonitor", "PrometheusRule"],
    "networking.k8s.io/v1": ["NetworkPolicy"],
    "policy/v1": ["PodDisruptionBudget"],
    "rbac.authorization.k8s.io/v1": ["ClusterRole", "ClusterRoleBinding"],
}
# Kinds without namespaces.
CLUSTER = {"CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding"}
# Kinds of the Prometheus operator, of which no schema can be installed here.
OPERATOR = {"PodMonitor", "PrometheusRule"}

BASE = {"cluster": "east", "network": "east", "image": {"repository": "strait"}}
# The values with which the chart makes what deploy/kubernetes has.
MANUAL = {**BASE, "trustDomain": "east.local", "trustDomains": ["west.local"], "image": {"repository": "strait", "tag": "latest"}}
ALL = {
    **MANUAL,
    "config": {
        "policy": {"istio": "audit"}, "limits": {"connection_age": "1h"},
        "exposure": {"kubernetes": {}},
    },
    "crds": {"create": True},
    "service": {
        "ports": [{"name": "tls", "port": 15443}],
        "annotations": {"a": "b"},
        "externalTrafficPolicy": "Local",
        "loadBalancerSourceRanges": ["198.51.100.0/24"],
        "ipFamilies": ["IPv4"],
    },
    "autoscaling": {"enabled": True, "targetDescriptors": 500000, "targetTunnels": 10000, "autoscaleBehavior": {"scaleDown": {"stabilizationWindowSeconds": 600}}},
    "networkPolicy": {"enabled": True},
    "revision": "canary",
    "labels": {"team": "mesh"}, "annotations": {"a": "b"},
    "podLabels": {"c": "d"}, "podAnnotations": {"e": "f"},
    "imagePullSecrets": [{"name": "registry"}], "priorityClassName": "system-cluster-critical",
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "edge", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}}, "minReadySeconds": 5,
    "podSecurityContext": {"fsGroup": 1337}, "containerSecurityContext": {"runAsNonRoot": True},
    "serviceAccount": {"annotations": {"a": "b"}},
    "env": {"LOG_FORMAT": "json", "DEPTH": 3}, "envVarFrom": [{"configMapRef": {"name": "more"}}],
    "volumes": [{"name": "crl", "configMap": {"name": "crl"}}],
    "volumeMounts": [{"name": "crl", "mountPath": "/var/run/secrets/istio/crl"}],
    "monitoring": {
        "podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboard": {"enabled": True}, "runbook": "https://example.com/operations.md",
    },
}
CASES = {
    "manual": MANUAL,
    "managed": {**MANUAL, "managed": True},
    "everything": ALL,
    "everything managed": {**ALL, "managed": True, "flavor": "solo"},
    "solo": {**MANUAL, "flavor": "solo"},
    # Names that YAML reads as another type.
    "words": {
        **MANUAL, "cluster": "123", "network": "on", "trustDomain": "1e3", "revision": "true",
        "priorityClassName": "yes", "networkPolicy": {"enabled": True, "metricsNamespaces": ["123"]},
    },
    "words managed": {
        **MANUAL, "managed": True, "network": "123", "revision": "1e3", "priorityClassName": "on",
    },
    # A map of values is merged with that of the defaults, and null removes a key of it.
    "without defaults": {
        **MANUAL, "podDisruptionBudget": None, "strategy": {"type": "Recreate", "rollingUpdate": None},
    },
    # Keys of sections whose other keys are those of the pod.
    "parts of the pod's sections": {
        **MANUAL, "config": {
            "gateway": {"locality": {"region": "us-east"}}, "identity": {"ttl": "12h"},
            "trust": {"clusters": [{"name": "west", "issuers": ["0" * 64]}]},
            "discovery": {"hold": "20m"},
        },
    },
    "another budget": {
        **MANUAL, "managed": True, "gateway": {"create": False},
        "podDisruptionBudget": {"minAvailable": 1, "maxUnavailable": None},
        "service": {"ipFamilyPolicy": ""}, "topologySpreadConstraints": [],
    },
}
# Wrong values, and what the error has to name.
WRONG = [
    ({"replicaCuont": 3}, "replicaCuont"),
    ({"flavor": "isito"}, "flavor"),
    ({"service": {"type": "loadbalancer"}}, "type"),
    ({"image": {"tga": "1"}}, "tga"),
    ({"autoscaling": {"targetDescriptors": "1k"}}, "targetDescriptors"),
    ({"config": {"limits": {"connectons": 1}}}, "connectons"),
    ({"config": {"trust": {"domians": []}}}, "domians"),
    ({"config": {"discovery": {"hodl": "20m"}}}, "hodl"),
    ({"istiod": "istiod.istio-system.svc"}, "istiod"),
    ({"istiod": "https://istiod.istio-system.svc:15012"}, "istiod"),
    ({"name": "East_West"}, "name"),
    ({"trustDomain": "spiffe://east.local"}, "trustDomain"),
    ({"trustDomains": ["spiffe://west.local"]}, "trustDomains"),
    ({"image": {"repository": "registry:5000/strait:1"}}, "repository"),
    ({"terminationGracePeriodSeconds": "30s"}, "terminationGracePeriodSeconds"),
    ({"cluster": ""}, "`cluster` is required"),
    ({"network": ""}, "`network` is required"),
    ({"image": {"repository": ""}}, "`image.repository` is required"),
]


class Stub(http.server.BaseHTTPRequestHandler):
    """API server that has nothing, and keeps what is created."""

    protocol_version = "HTTP/1.1"
    created = []

    def log_message(self, *_):
        pass

    def answer(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        path = self.path.split("?")[0]
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if path == "/version":
            self.answer(200, {"major": "1", "minor": "37", "gitVersion": "v1.37.0"})
        elif path == "/api":
            self.answer(200, {"kind": "APIVersions", "versions": ["v1"]})
        elif path == "/apis":
            groups = [
                {"name": version.split("/")[0], "versions": [each], "preferredVersion": each}
                for version in KINDS if "/" in version
                for each in [{"groupVersion": version, "version": version.split("/")[1]}]
            ]
            self.answer(200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        elif version in KINDS:
            verbs = ["create", "get", "list", "patch", "delete"]
            resources = [
                {"name": plural(kind), "singularName": kind.lower(), "namespaced": kind not in CLUSTER,
                 "kind": kind, "verbs": verbs}
                for kind in KINDS[version]
            ]
            self.answer(200, {"kind": "APIResourceList", "apiVersion": "v1",
                              "groupVersion": version, "resources": resources})
        elif path.endswith("/secrets"):
            self.answer(200, {"kind": "SecretList", "apiVersion": "v1", "items": []})
        else:
            self.answer(404, {"kind": "Status", "apiVersion": "v1", "status": "Failure",
                              "reason": "NotFound", "code": 404})

    def take(self):
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if "json" not in self.headers.get("Content-Type", ""):
            # Helm's own records are Secrets in the format of protobuf.
            self.answer(201, {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "record"}})
            return
        body = json.loads(body)
        Stub.created.append(body)
        self.answer(201, body)

    do_POST = do_PUT = do_PATCH = take


@contextlib.contextmanager
def quiet():
    """Drops what Helm's library writes to stderr: that files of the chart are symbolic links."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def plural(kind):
    return kind.lower().removesuffix("y") + ("ies" if kind.endswith("y") else "s")


class Helm:
    """Helm, by the functions of its library."""

    def __init__(self, library):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stub)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        kubeconfig = yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "stub",
            "clusters": [{"name": "stub", "cluster": {
                "server": f"http://127.0.0.1:{server.server_address[1]}"}}],
            "contexts": [{"name": "stub", "context": {"cluster": "stub", "user": "stub"}}],
            "users": [{"name": "stub", "user": {}}],
        })
        self.folder = tempfile.TemporaryDirectory()
        config = pathlib.Path(self.folder.name) / "config"
        config.write_text(kubeconfig)
        # Discovery is cached in the home directory.
        os.environ["HOME"] = self.folder.name
        self.library = ctypes.CDLL(str(library))
        self.library.helm_sdkpy_last_error.restype = ctypes.c_char_p
        self.handle = ctypes.c_ulonglong()
        made = self.library.helm_sdkpy_config_create(
            b"istio-system", str(config).encode(), b"", b"{}", ctypes.byref(self.handle))
        if made != 0:
            raise RuntimeError(self.error())

    def error(self):
        return self.library.helm_sdkpy_last_error().decode()

    def install(self, values):
        """The objects that the chart makes of these values. Raises Helm's error."""
        Stub.created.clear()
        options = {"wait": False, "timeout_seconds": 30, "disable_openapi_validation": True}
        result = ctypes.c_char_p()
        with quiet():
            done = self.library.helm_sdkpy_install(
                self.handle, b"eastwest", str(CHART).encode(), json.dumps(values).encode(), b"",
                json.dumps(options).encode(), ctypes.byref(result))
        if done != 0:
            raise ValueError(self.error())
        return list(Stub.created)


def values_schema():
    """The schema of the values: our own, with that of strait.yaml below `config`."""
    schema = yaml.safe_load((check.HERE / "values.schema.yaml").read_text())
    config = json.loads((TOP / "docs" / "strait.schema.json").read_text())
    # The pod says what strait.yaml leaves out, whole sections and keys of them.
    for key in ("$schema", "required", "title"):
        config.pop(key)
    for name in ("gateway", "identity", "trust", "discovery"):
        section = config["properties"][name]
        section["required"] = []
        # Without `kind`, that of the pod is meant.
        if "oneOf" in section:
            section["anyOf"] = section.pop("oneOf")
            for kind in section["anyOf"]:
                kind["required"] = []
    trust = config["properties"]["trust"]
    domains = {"required": ["domains"]}
    trust["allOf"] = [each for each in trust["allOf"] if domains not in each.get("anyOf", [])]
    schema["properties"]["config"] = config
    return json.dumps(schema, indent=1) + "\n"


def without_labels(document):
    """The document without what only the chart adds."""
    if isinstance(document, dict):
        return {
            key: without_labels(value) for key, value in document.items()
            if not re.match(r"app\.kubernetes\.io/|helm\.sh/|meta\.helm\.sh/", key)
        }
    if isinstance(document, list):
        return [without_labels(each) for each in document]
    return document


def same(chart, manifest, way):
    """Where a rendered object differs from the manifest."""
    if isinstance(chart, dict) and isinstance(manifest, dict):
        for key in sorted(chart.keys() | manifest.keys()):
            yield from same(chart.get(key), manifest.get(key), f"{way}.{key}")
    elif isinstance(chart, list) and isinstance(manifest, list) and len(chart) == len(manifest):
        named = all(isinstance(each, dict) and "name" in each for each in chart + manifest)
        if named:
            chart, manifest = (sorted(it, key=lambda each: each["name"]) for it in (chart, manifest))
        for index, (one, other) in enumerate(zip(chart, manifest)):
            yield from same(one, other, f"{way}[{index}]")
    elif (chart or None) != (manifest or None):
        yield f"{way}: the chart has {chart!r}, and the manifest {manifest!r}"


# What the chart says and the manifest leaves to the default, or has otherwise by its nature.
DIFFERS = {
    "ServiceAccount.automountServiceAccountToken", "ServiceAccount.metadata.labels",
    "PodDisruptionBudget.metadata.labels", "Gateway.metadata.labels.app",
    "Deployment.metadata.annotations", "ServiceAccount.metadata.annotations",
    "PodDisruptionBudget.metadata.annotations", "Gateway.metadata.annotations",
    "Deployment.spec.template.spec.volumes[5].configMap.name",
}


def compared(rendered):
    """How the default chart differs from the manifests of the manual way."""
    texts = [check.FOLDER / "workload.yaml", check.FOLDER / "istio" / "manual.yaml"]
    manifests = [each for path in texts for each in yaml.safe_load_all(path.read_text())]
    wrong = []
    for manifest in manifests:
        chart = without_labels(check.the(rendered, manifest["kind"]))
        wrong += [
            line for line in same(chart, manifest, manifest["kind"])
            if line.split(":")[0] not in DIFFERS
        ]
    kinds = sorted(each["kind"] for each in rendered)
    if kinds != sorted(each["kind"] for each in manifests):
        wrong.append(f"the chart makes {', '.join(kinds)}")
    return wrong


def refused(document):
    """Why a rendered object is refused, or None. Helm adds annotations of its own."""
    metadata = document["metadata"]
    annotations = metadata.get("annotations") or {}
    own = {key: value for key, value in annotations.items() if not key.startswith("meta.helm.sh/")}
    metadata.pop("annotations", None)
    if own:
        metadata["annotations"] = own
    kind = document["kind"]
    if kind in OPERATOR:
        return None if document["spec"] else "it is empty"
    if kind == "ConfigMap" and not metadata["name"].endswith("-overlay"):
        return None if all(isinstance(yaml.safe_load(text), dict) for text in document["data"].values()) else "no document"
    return check.refused(document)


def queries(rendered):
    """The expressions of the dashboard and the alerts, as rules for promtool."""
    board = json.loads(DASHBOARD.read_text())
    expressions = [
        target["expr"] for panel in board["panels"] for target in panel.get("targets", [])
    ]
    for group in check.the(rendered, "PrometheusRule")["spec"]["groups"]:
        expressions += [rule["expr"] for rule in group["rules"]]
    return [text.replace("$__rate_interval", "1m") for text in expressions]


def check_queries(rendered, promtool):
    """What is wrong with the queries: metrics that are not documented, or that do not parse."""
    known = set(re.findall(r"^\| `([a-z_]+)`", (TOP / "docs" / "metrics.md").read_text(), re.M))
    wrong, rules = [], []
    for index, text in enumerate(queries(rendered)):
        names = {
            re.sub(r"_(bucket|sum|count)$", "", name)
            for name in re.findall(r"\b(?:strait|istio)_[a-z_]+", text)
        }
        wrong += [f"{name} of `{text}` is not in docs/metrics.md" for name in names - known]
        rules.append({"record": f"query:{index}", "expr": text})
    rules = {"groups": [{"name": "queries", "rules": rules}]}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(rules, file)
        file.flush()
        command = [promtool, "check", "rules", file.name]
        checked = subprocess.run(command, capture_output=True, text=True)
    if checked.returncode != 0:
        wrong.append(checked.stderr + checked.stdout)
    return wrong


def check_autoscaler(rendered):
    """Whether the autoscaler has the values of descriptors and tunnels."""
    metrics = check.the(rendered, "HorizontalPodAutoscaler")["spec"]["metrics"]
    pods = [each["pods"] for each in metrics if each["type"] == "Pods"]
    found = {each["metric"]["name"]: each["target"]["averageValue"] for each in pods}
    wanted = {"process_open_fds": "500000", "strait_tunnels_open": "10000"}
    return [] if found == wanted else [f"the autoscaler has {found}"]


def check_alerts(rendered):
    """Whether each alert has its place in docs/operations.md."""
    text = (TOP / "docs" / "operations.md").read_text()
    anchors = {line.lstrip("# ").lower() for line in text.splitlines() if line.startswith("#")}
    wrong = []
    for group in check.the(rendered, "PrometheusRule")["spec"]["groups"]:
        for rule in group["rules"]:
            url = rule["annotations"].get("runbook_url", "#")
            if url.split("#")[1] not in anchors:
                wrong.append(f"alert {rule['alert']}: docs/operations.md has no heading for {url}")
    return wrong


def main():
    library, promtool = sys.argv[1:]
    schema = values_schema()
    if os.environ.get("STRAIT_UPDATE") == "1":
        SCHEMA.write_text(schema)
    wrong = []
    if SCHEMA.read_text() != schema:
        wrong.append(f"{SCHEMA} is not current: type  STRAIT_UPDATE=1 make check-chart")
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    try:
        jsonschema.validate(defaults, json.loads(schema))
    except jsonschema.ValidationError as error:
        wrong.append(f"values.yaml: {error.message}")
    helm = Helm(library)
    rendered = {}
    for name, values in CASES.items():
        try:
            rendered[name] = helm.install(values)
        except ValueError as error:
            wrong.append(f"{name}: {error}")
            continue
        for document in rendered[name]:
            why = refused(document)
            if why is not None:
                wrong.append(f"{name}: {document['kind']} {document['metadata']['name']}: {why}")
    for values, names in WRONG:
        try:
            helm.install({**BASE, **values})
            wrong.append(f"{values} is accepted")
        except ValueError as error:
            if names not in str(error):
                wrong.append(f"the error of {values} does not name {names}: {error}")
    if not wrong:
        wrong += compared(rendered["manual"])
        wrong += check_queries(rendered["everything"], promtool)
        wrong += check_alerts(rendered["everything"])
        wrong += check_autoscaler(rendered["everything"])
    for line in wrong:
        print(line, file=sys.stderr)
    count = sum(map(len, rendered.values()))
    print(f"deploy/helm: {count} objects of {len(CASES)} sets of values, "
          f"{len(WRONG)} wrong values, {len(wrong)} mistakes")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
