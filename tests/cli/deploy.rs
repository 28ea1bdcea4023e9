//! The manifests of `deploy/kubernetes` match the program: `strait proxy` accepts the pod's
//! arguments, variables and paths.

use std::path::Path;

use serde_json::Value;

use crate::support::{CommandOutput, done_with, folder_with_certificates, run, write};

/// The documents of a manifest.
fn manifest(name: &str) -> Vec<Value> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/kubernetes");
    let text = std::fs::read_to_string(folder.join(name)).expect("a manifest");
    let documents = text.split("\n---\n");
    let parse = |text| serde_saphyr::from_str(text).expect("YAML");
    documents.map(parse).collect()
}

fn container(pod: &Value) -> &Value {
    &pod["spec"]["template"]["spec"]["containers"][0]
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("{key} of {value} is text"))
}

/// Returns the variables of a container. Values that Kubernetes takes from the pod are named after
/// their fields.
fn variables(container: &Value) -> Vec<(String, String)> {
    let list = container["env"].as_array().expect("a list");
    let value = |of: &Value| match of["value"].as_str() {
        Some(value) => value.to_owned(),
        None => text(&of["valueFrom"]["fieldRef"], "fieldPath").replace('.', "-"),
    };
    list.iter().map(|of| (text(of, "name").to_owned(), value(of))).collect()
}

/// Creates a folder as the pod's root: something at each mounted path, and the files that
/// Kubernetes puts there.
async fn root(container: &Value) -> tempfile::TempDir {
    let folder = folder_with_certificates().await;
    for mount in container["volumeMounts"].as_array().expect("a list") {
        let path = text(mount, "mountPath").trim_start_matches('/');
        std::fs::create_dir_all(folder.path().join(path)).expect("a folder");
    }
    // Into folders that have to be mounted: a write to another one fails.
    let roots = std::fs::read_to_string(folder.path().join("certs/root.crt")).expect("roots");
    write(folder.path(), "var/run/secrets/istio/root-cert.pem", &roots);
    write(folder.path(), "var/run/secrets/tokens/istio-token", "a token");
    write(folder.path(), "etc/istio/pod/labels", "app=\"eastwest\"\n");
    folder
}

async fn printed(
    folder: &Path,
    arguments: &[&str],
    variables: &[(String, String)],
) -> CommandOutput {
    let done = done_with(folder, arguments, |command| {
        command.env_clear().envs(variables.iter().cloned());
        command.arg("--print-config");
    });
    done.await
}

/// Returns true if a line has the value `reported` with the origin `by`.
fn says(done: &CommandOutput, reported: &str, by: &str) -> bool {
    let squeezed = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    done.stdout.lines().any(|line| squeezed(line) == format!("{reported} # {by}"))
}

#[test]
fn the_pods_of_the_manifests_start_by_what_they_are_given() {
    run(async {
        let workload = manifest("workload.yaml");
        let is_deployment = |of: &&Value| of["kind"] == "Deployment";
        let deployment = workload.iter().find(is_deployment).expect("a Deployment");
        let container = container(deployment);
        let folder = root(container).await;
        let arguments = container["args"].as_array().expect("a list");
        let arguments: Vec<_> = arguments.iter().map(|of| of.as_str().expect("text")).collect();
        let done = printed(folder.path(), &arguments, &variables(container)).await;
        assert_eq!((done.code, done.stderr.lines().count()), (Some(0), 1), "{done:?}");
        let address = "address: \"istiod.istio-system.svc:15012\"";
        for (reported, by) in [
            ("cluster: east", "ISTIO_META_CLUSTER_ID"),
            ("network: east", "ISTIO_META_NETWORK"),
            (address, "CA_ADDR"),
            (address, "XDS_ADDRESS"),
            ("kind: istio-ca", "the pod's default"),
            ("namespace: metadata-namespace", "POD_NAMESPACE"),
            ("name: east.local", "TRUST_DOMAIN"),
            ("name: west.local", "TRUST_DOMAINS"),
            ("deadline: \"20s\"", "TERMINATION_GRACE_PERIOD_SECONDS"),
            ("level: info", "--log_output_level"),
            ("cache: ./var/lib/istio/data/strait-mesh", "the pod's default"),
        ] {
            assert!(says(&done, reported, by), "{reported} by {by}\n{}", done.stdout);
        }
        let bound = |port: &Value| {
            let port = format!("\"[::]:{}\"", port["containerPort"]);
            done.stdout.contains(&port)
        };
        assert!(container["ports"].as_array().expect("a list").iter().all(bound));
        let grace = &deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"];
        let received = variables(container);
        let received = received.iter().find(|(name, _)| name == "TERMINATION_GRACE_PERIOD_SECONDS");
        assert_eq!(received.map(|(_, seconds)| &**seconds), Some(&*grace.to_string()));
    });
}

#[test]
fn the_overlay_adds_variables_that_mean_something() {
    run(async {
        let overlay = manifest("overlay.yaml");
        let patch: Value =
            serde_saphyr::from_str(text(&overlay[0]["data"], "deployment")).expect("YAML");
        let workload = manifest("workload.yaml");
        let is_deployment = |of: &&Value| of["kind"] == "Deployment";
        let pod = workload.iter().find(is_deployment).expect("a Deployment");
        let folder = root(container(pod)).await;
        let arguments = ["proxy", "waypoint", "--outlierLogPath", "/dev/stdout"];
        let done = printed(folder.path(), &arguments, &variables(container(&patch))).await;
        assert_eq!(done.code, Some(0), "{done:?}");
        for (reported, by) in [
            ("name: west.local", "TRUST_DOMAINS"),
            ("deadline: \"20s\"", "TERMINATION_GRACE_PERIOD_SECONDS"),
        ] {
            assert!(says(&done, reported, by), "{reported} by {by}\n{}", done.stdout);
        }
    });
}
