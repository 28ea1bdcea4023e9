"""Checks deploy/kubernetes: every manifest against a strict schema, what they say of each other,
and that the check is strict: each field, mistyped by one letter, must be refused.

Core kinds are judged by the schemas of Kubernetes (PyPI kubernetes-validate), Gateways by
gateway.schema.yaml beside this file. The patches of the ConfigMap are laid over a Deployment such
as istiod makes, and judged with it.
"""

import copy
import pathlib
import sys

import jsonschema
import kubernetes_validate
import yaml

HERE = pathlib.Path(__file__).parent
FOLDER = HERE.parent.parent / "deploy" / "kubernetes"
GATEWAY = yaml.safe_load((HERE / "gateway.schema.yaml").read_text())
VERSION = "1.37"

# Keys of maps whose keys are data: a mistyped one is another word, and no mistake of form.
FREE = {"labels", "annotations", "matchLabels", "data", "requests", "limits", "selector"}

# Objects that istiod makes for a managed gateway, as far as the patches touch them.
MANAGED = {
    "deployment": yaml.safe_load((HERE / "rendered.yaml").read_text()),
    "service": {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "eastwest", "namespace": "istio-system"},
        "spec": {"type": "LoadBalancer", "ports": [{"name": "mesh", "port": 15008}]},
    },
    "serviceAccount": {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "eastwest", "namespace": "istio-system"},
    },
    "podDisruptionBudget": {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "eastwest", "namespace": "istio-system"},
        "spec": {"selector": {"matchLabels": {"a": "b"}}},
    },
    "horizontalPodAutoscaler": {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "eastwest", "namespace": "istio-system"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "eastwest"},
            "maxReplicas": 1,
        },
    },
}


def patched(base, patch):
    """Strategic merge, as far as it is needed: maps by key, lists of named things by name."""
    if isinstance(base, dict) and isinstance(patch, dict):
        keys = list(base) + [key for key in patch if key not in base]
        return {
            key: patched(base[key], patch[key]) if key in base and key in patch
            else patch.get(key, base.get(key))
            for key in keys
        }
    if isinstance(base, list) and isinstance(patch, list) and patch:
        if all(isinstance(item, dict) and "name" in item for item in base + patch):
            named = {item["name"]: item for item in base}
            for item in patch:
                named[item["name"]] = patched(named.get(item["name"], {}), item)
            return list(named.values())
    return patch


def judge(document):
    """Raises what is wrong with a document, its patches included."""
    if document.get("kind") == "Gateway":
        jsonschema.validate(document, GATEWAY)
        return
    kubernetes_validate.validate(document, VERSION, strict=True)
    if document["kind"] == "ConfigMap":
        for key, text in document["data"].items():
            judge(patched(MANAGED[key], yaml.safe_load(text)))


def refused(document):
    """Why a document is refused, or None."""
    try:
        judge(document)
    except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
        return error.message.splitlines()[0]
    except KeyError as error:
        return f"no such key: {error}"
    return None


def fields(value, way=()):
    """The way to each field whose name is part of the form."""
    if isinstance(value, dict):
        for key, below in value.items():
            if not way or way[-1] not in FREE or way[-2:] == ("spec", "selector"):
                yield way + (key,)
            yield from fields(below, way + (key,))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from fields(below, way + (index,))


def mistyped(document, way):
    """The document with one field's name changed."""
    changed = copy.deepcopy(document)
    place = changed
    for step in way[:-1]:
        place = place[step]
    name = way[-1]
    place[name[:-1] + ("x" if name[-1] != "x" else "y")] = place.pop(name)
    return changed


def is_free(document, way):
    """A Service selects by a plain map of labels; others have matchLabels. Definitions have names of
    their own below `properties`."""
    if document["kind"] == "CustomResourceDefinition" and "properties" in way:
        return True
    return document["kind"] == "Service" and way[:2] == ("spec", "selector") and len(way) > 2


def strictness(name, document):
    """Every field that could be mistyped without being refused; and how many there are."""
    slips, count = [], 0
    for way in fields(document):
        if is_free(document, way):
            continue
        count += 1
        if refused(mistyped(document, way)) is None:
            slips.append(f"{name}: {'.'.join(map(str, way))} can be mistyped unseen")
    if document["kind"] == "ConfigMap":
        for key, text in document["data"].items():
            patch = yaml.safe_load(text)
            for way in fields(patch):
                count += 1
                slip = copy.deepcopy(document)
                slip["data"][key] = yaml.safe_dump(mistyped(patch, way))
                if refused(slip) is None:
                    way = ".".join(map(str, way))
                    slips.append(f"{name}: {key}: {way} can be mistyped unseen")
    return slips, count


def the(documents, kind):
    """The only document of a kind."""
    found = [document for document in documents if document["kind"] == kind]
    assert len(found) == 1, f"{len(found)} documents of kind {kind}"
    return found[0]


def env(container):
    """The variables of a container that have a value of their own."""
    return {entry["name"]: entry.get("value") for entry in container["env"]}


def examples(files, pod, patch):
    """Names that several manifests have: one of them changed alone would be a contradiction."""
    own, overlay = env(pod["spec"]["containers"][0]), env(patch["containers"][0])
    networks = {
        (where.get("labels") or {}).get("topology.istio.io/network")
        for documents in files.values()
        for document in documents
        if document["kind"] in ("Gateway", "Deployment", "Service")
        for where in [document["metadata"]]
    }
    images = {one["containers"][0]["image"] for one in (pod["spec"], patch)}
    remote = the(files["solo/remote.yaml"], "Gateway")["metadata"]["annotations"]
    shared = ("TRUST_DOMAINS", "TERMINATION_GRACE_PERIOD_SECONDS")
    network = own["ISTIO_META_NETWORK"]
    return [
        ("both ways have one image", len(images) == 1),
        ("both ways say the same of other trust domains and of the grace period",
         all(own[name] == overlay[name] for name in shared)),
        ("our trust domain is that of the remote Gateway",
         own["TRUST_DOMAIN"] == remote["gateway.istio.io/trust-domain"]),
        ("our trust domain is none of the others'",
         own["TRUST_DOMAIN"] not in own["TRUST_DOMAINS"].split(",")),
        ("there is one network", networks == {network}
         and own["ISTIO_META_REQUESTED_NETWORK_VIEW"] == network
         and pod["metadata"]["labels"]["topology.istio.io/network"] == network),
        ("pods of both dialects have no label of one dialect's class",
         "gateway.networking.k8s.io/gateway-class-name" not in pod["metadata"]["labels"]),
        ("the grace period is what the pod is told",
         all(str(one["terminationGracePeriodSeconds"]) == told[shared[1]]
             for one, told in ((pod["spec"], own), (patch, overlay)))),
    ]


def together(files):
    """What the manifests say of each other."""
    workload = files["workload.yaml"]
    deployment, service = the(workload, "Deployment"), the(workload, "Service")
    account, budget = the(workload, "ServiceAccount"), the(workload, "PodDisruptionBudget")
    policy = the(files["network-policy.yaml"], "NetworkPolicy")
    overlay = the(files["overlay.yaml"], "ConfigMap")
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    mounted = {mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
    service_ports = {port["port"]: ports.get(port["targetPort"]) for port in service["spec"]["ports"]}
    patch = yaml.safe_load(overlay["data"]["deployment"])["spec"]["template"]["spec"]
    rules = [
        ("the overlay patches istiod's container",
         [container["name"] for container in patch["containers"]] == ["istio-proxy"]),
        ("neither ztunnel nor a sidecar takes the pods, and istiod knows them as a gateway's",
         labels >= {
             "istio.io/dataplane-mode": "none",
             "sidecar.istio.io/inject": "false",
             "gateway.istio.io/managed": "istio.io-eastwest-controller",
         }.items()),
        ("the Service selects the pods", service["spec"]["selector"].items() <= labels),
        ("the Deployment selects its pods",
         deployment["spec"]["selector"]["matchLabels"].items() <= labels),
        ("the budget selects the pods", budget["spec"]["selector"]["matchLabels"].items() <= labels),
        ("the policy selects the pods",
         policy["spec"]["podSelector"]["matchLabels"].items() <= labels),
        ("the pods have the ServiceAccount",
         pod["spec"]["serviceAccountName"] == account["metadata"]["name"]),
        ("the Service's ports are the pods'",
         service_ports == {15008: 15008, 15021: 15021}),
        ("what is mounted is a volume and the other way round",
         mounted == {volume["name"] for volume in pod["spec"]["volumes"]}),
    ]
    rules += examples(files, pod, patch)
    for dialect in ("istio", "solo"):
        managed = the(files[f"{dialect}/managed.yaml"], "Gateway")
        manual = the(files[f"{dialect}/manual.yaml"], "Gateway")
        remote = the(files[f"{dialect}/remote.yaml"], "Gateway")
        host = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc.cluster.local"
        annotations = remote["metadata"]["annotations"]
        rules += [
            (f"{dialect}: the managed Gateway names the overlay",
             managed["spec"]["infrastructure"]["parametersRef"]["name"]
             == overlay["metadata"]["name"]),
            (f"{dialect}: a managed Gateway has no address", "addresses" not in managed["spec"]),
            (f"{dialect}: the manual Gateway's address is the Service",
             manual["spec"]["addresses"] == [{"type": "Hostname", "value": host}]),
            (f"{dialect}: the account has the Gateway's name",
             manual["metadata"]["name"] == account["metadata"]["name"]),
            (f"{dialect}: the remote Gateway names the account",
             annotations["gateway.istio.io/service-account"] == account["metadata"]["name"]),
            (f"{dialect}: the remote Gateway is of our network",
             remote["metadata"]["labels"].items()
             >= {("topology.istio.io/network",
                  pod["metadata"]["labels"]["topology.istio.io/network"])}),
        ]
    return [f"it does not hold that {rule}" for rule, holds in rules if not holds]


def main():
    files = {
        str(path.relative_to(FOLDER)): list(yaml.safe_load_all(path.read_text()))
        for path in sorted(FOLDER.rglob("*.yaml"))
    }
    wrong, documents, count = [], 0, 0
    for name, parts in files.items():
        for document in parts:
            documents += 1
            why = refused(document)
            if why is not None:
                wrong.append(f"{name}: {document['kind']}: {why}")
                continue
            slips, tried = strictness(name, document)
            wrong += slips
            count += tried
    wrong += together(files)
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"deploy/kubernetes: {documents} manifests, {count} mistyped fields, {len(wrong)} mistakes")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
