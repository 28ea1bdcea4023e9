//! `strait proxy`: its output, and its handling of mistakes.

use std::path::Path;

use crate::support::{CommandOutput, done_with, folder_with_certificates, run, write};

const MESH: &str = "services: []\nworkloads: []\n";

/// Runs it for a pod whose root is `folder`.
async fn proxy(folder: &Path, variables: &[(&str, &str)], arguments: &[&str]) -> CommandOutput {
    done_with(folder, arguments, |command| {
        command.env_clear().envs(variables.iter().copied());
    })
    .await
}

async fn pod() -> tempfile::TempDir {
    let folder = folder_with_certificates().await;
    let mounted = folder.path().join("etc/certs");
    std::fs::create_dir_all(&mounted).expect("a folder");
    for (from, to) in [
        ("gateway.crt", "cert-chain.pem"),
        ("gateway.key", "key.pem"),
        ("root.crt", "root-cert.pem"),
    ] {
        let from = folder.path().join("certs").join(from);
        std::fs::copy(from, mounted.join(to)).expect("a file");
    }
    write(folder.path(), "mesh.yaml", MESH);
    folder
}

#[test]
fn it_prints_what_is_in_force_and_who_says_so() {
    run(async {
        let folder = pod().await;
        write(folder.path(), "over.yaml", "workers: 2\n");
        let variables = [
            ("LOCAL_XDS_PATH", "mesh.yaml"),
            ("TRUST_DOMAIN", "east.local"),
            ("ISTIO_META_CLUSTER_ID", "east"),
        ];
        let arguments = ["proxy", "router", "--stsPort=1", "-c", "over.yaml", "--print-config"];
        let done = proxy(folder.path(), &variables, &arguments).await;
        assert_eq!(done.code, Some(0), "{done:?}");
        let squeezed = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let lines: Vec<_> = done.stdout.lines().map(squeezed).collect();
        for line in [
            "cluster: east # ISTIO_META_CLUSTER_ID",
            "workers: 2 # over.yaml:1",
            "path: mesh.yaml # LOCAL_XDS_PATH",
            "key: ./etc/certs/key.pem # the pod's default",
            "default: none # the default",
            "istio: \"off\" # the default",
            "deadline: \"20s\" # the default",
        ] {
            assert!(lines.contains(&line.to_owned()), "{line}\n{}", done.stdout);
        }
        // Its output is the YAML alone.
        assert!(done.stderr.starts_with("over.yaml: ok: 1 listener,"), "{done:?}");
        assert_eq!(done.stderr.lines().count(), 1, "{done:?}");
        assert!(!done.stdout.contains("over.yaml: ok"), "{done:?}");
    });
}

#[test]
fn it_names_the_variables_that_are_wrong() {
    run(async {
        let folder = pod().await;
        let variables = [("LOCAL_XDS_PATH", "absent.yaml"), ("TRUST_DOMAIN", "a b")];
        for arguments in [&["proxy", "waypoint"][..], &["proxy", "waypoint", "--print-config"]] {
            let done = proxy(folder.path(), &variables, arguments).await;
            assert_eq!(done.code, Some(1), "{done:?}");
            for line in ["LOCAL_XDS_PATH: error: ", "TRUST_DOMAIN: error: "] {
                assert!(done.stderr.contains(line), "{done:?}");
            }
        }
    });
}

#[test]
fn a_role_that_does_not_exist_is_refused_and_help_is_given_anywhere() {
    run(async {
        let folder = tempfile::tempdir().expect("a folder");
        let done = proxy(folder.path(), &[], &["proxy", "sidecars"]).await;
        assert_eq!(done.code, Some(2), "{done:?}");
        for arguments in [
            &["proxy", "--help"][..],
            &["proxy", "waypoint", "--help"],
            &["proxy", "waypoint", "--domain", "x", "-h"],
        ] {
            let done = proxy(folder.path(), &[], arguments).await;
            assert_eq!(done.code, Some(0), "{done:?}");
            assert!(done.stdout.contains("Examples:"), "{done:?}");
        }
    });
}

/// A pod with the files that Istio mounts, `root` and `token` in them.
fn mounted(root: &str, token: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for (path, name, text) in [
        ("var/run/secrets/istio", "root-cert.pem", root),
        ("var/run/secrets/tokens", "istio-token", token),
    ] {
        std::fs::create_dir_all(folder.path().join(path)).expect("a folder");
        write(folder.path(), &format!("{path}/{name}"), text);
    }
    folder
}

#[test]
fn roots_and_a_token_that_hold_nothing_are_mistakes_though_nobody_is_asked() {
    run(async {
        let certificates = folder_with_certificates().await;
        let root = std::fs::read_to_string(certificates.path().join("certs/root.crt"));
        let root = root.expect("a root");
        let arguments = ["proxy", "waypoint", "--print-config"];
        let variables = [("POD_NAMESPACE", "a"), ("SERVICE_ACCOUNT", "b")];
        let good = mounted(&root, "a token");
        let done = proxy(good.path(), &variables, &arguments).await;
        assert_eq!(done.code, Some(0), "{done:?}");
        let reported =
            "the mesh comes from istiod.istio-system.svc:15012, which was not contacted\n";
        assert!(done.stderr.ends_with(reported), "{done:?}");
        assert_eq!(done.stderr.lines().count(), 1, "{done:?}");
        let (roots, tokens) =
            ("istio/root-cert.pem: contains no", "tokens/istio-token: contains no");
        for (root, token, wrong) in
            [("junk", "a token", roots), ("", "a token", roots), (&*root, " \n", tokens)]
        {
            let folder = mounted(root, token);
            let done = proxy(folder.path(), &variables, &arguments).await;
            assert_eq!(done.code, Some(1), "{done:?}");
            let errors: Vec<_> = done.stderr.lines().filter(|l| l.contains("error: ")).collect();
            assert!(errors.len() == 1 && errors[0].contains(wrong), "{done:?}");
        }
        let done = proxy(good.path(), &[], &arguments).await;
        assert_eq!(done.code, Some(0), "{done:?}");
        for variable in ["POD_NAMESPACE", "SERVICE_ACCOUNT"] {
            let warned = format!("nor {variable} is set: a certificate is requested for spiffe://");
            assert!(done.stderr.contains(&warned), "{done:?}");
        }
    });
}

#[test]
fn a_slip_in_an_option_of_ours_starts_no_gateway() {
    run(async {
        let folder = tempfile::tempdir().expect("a folder");
        for (arguments, code, wanted) in [
            (&["proxy", "waypoint", "--print-confg"][..], 1, "did you mean --print-config?"),
            (&["proxy", "waypoint", "--cofnig=a"], 1, "did you mean --config?"),
            (
                &["proxy", "--print-config"],
                2,
                "the role comes first: strait proxy waypoint --print-config",
            ),
        ] {
            let done = proxy(folder.path(), &[], arguments).await;
            assert_eq!(done.code, Some(code), "{done:?}");
            assert!(done.stderr.contains(wanted), "{done:?}");
        }
    });
}

#[test]
fn a_file_is_checked_without_the_files_of_a_pod_and_from_a_pipe() {
    run(async {
        let folder = tempfile::tempdir().expect("a folder");
        write(folder.path(), "over.yaml", "policy: {istio: audit}\n");
        write(folder.path(), "wrong.yaml", "polcy: {istio: audit}\n");
        let program = env!("CARGO_BIN_EXE_strait");
        let shell = async |before: &str, file: &str| {
            let script = format!("{before} {program} proxy waypoint --print-config -c {file}");
            let mut shell = tokio::process::Command::new("sh");
            let variables = [("TRUST_DOMAIN", "east.local"), ("ISTIO_META_CLUSTER_ID", "east")];
            shell.args(["-c", &script]).current_dir(folder.path()).envs(variables);
            let done = shell.output().await.expect("an output");
            let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
            (done.status.code(), text(done.stdout), text(done.stderr))
        };
        for (before, file) in [("", "over.yaml"), ("cat over.yaml |", "/dev/stdin")] {
            let (code, printed, reported) = shell(before, file).await;
            assert_eq!(code, Some(0), "{reported}");
            assert!(printed.contains("istio: audit "), "{printed}");
            let absent = reported.matches("do not exist here").count();
            assert_eq!(absent, 1, "{reported}");
            assert!(reported.contains(&format!("{file}: ok: ")), "{reported}");
        }
        let (code, _, reported) = shell("", "wrong.yaml").await;
        assert_eq!(code, Some(1), "{reported}");
        assert!(reported.contains("`polcy`"), "{reported}");
    });
}

#[test]
fn in_the_pod_of_a_gateway_doctor_and_bug_report_read_its_settings() {
    run(async {
        let folder = pod().await;
        let variables = [
            ("POD_NAME", "eastwest-0"),
            ("ISTIO_META_CLUSTER_ID", "east"),
            ("TRUST_DOMAIN", "east.local"),
            ("LOCAL_XDS_PATH", "mesh.yaml"),
        ];
        let arguments = ["doctor", "-o", "json"];
        let done = proxy(folder.path(), &variables, &arguments).await;
        let page: serde_json::Value = serde_json::from_str(&done.stdout).expect("a page");
        let checks = page["checks"].as_array().expect("checks");
        let wanted = |name: &str, found: &str| {
            let mut checks = checks.iter().filter(|one| one["check"] == name);
            checks.any(|one| one["found"].as_str().is_some_and(|text| text.contains(found)))
        };
        assert!(wanted("configuration", "the pod is correct"), "{page:#}");
        assert!(wanted("certificate", "spiffe://east.local/"), "{page:#}");
        let arguments = ["bug-report", "--to", "-"];
        let done = proxy(folder.path(), &variables, &arguments).await;
        assert_eq!(done.code, Some(0), "{done:?}");
        assert!(done.stdout.contains("# ISTIO_META_CLUSTER_ID"), "{done:?}");
        // Elsewhere, and where a file is named, it is that file.
        for (variables, arguments) in
            [(&variables[1..], &["doctor"][..]), (&variables, &["doctor", "-c", "none.yaml"])]
        {
            let done = proxy(folder.path(), variables, arguments).await;
            assert_eq!(done.code, Some(1), "{done:?}");
            assert!(done.stdout.contains("the file cannot be read"), "{done:?}");
        }
    });
}
