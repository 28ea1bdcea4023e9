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
        assert_eq!((done.code, &*done.stderr), (Some(0), ""), "{done:?}");
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
        assert!(done.stdout.contains("over.yaml: ok: 1 listener,"), "{}", done.stdout);
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
        assert_eq!((done.code, &*done.stderr), (Some(0), ""), "{done:?}");
        let reported =
            "the mesh comes from istiod.istio-system.svc:15012, which was not contacted\n";
        assert!(done.stdout.ends_with(reported), "{}", done.stdout);
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
