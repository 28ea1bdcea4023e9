//! From an empty folder to a running gateway, by the commands in deploy/local.

use std::path::Path;
use std::process::Stdio;

use crate::support::{folder_with_certificates, get, interrupt, run, run_command, strait, until};

/// Copies deploy/local to a separate folder, at the same depth below `certs/` as in the checkout.
fn copy_of_the_example(folder: &Path, address: &str) {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/local");
    let to = folder.join("deploy/local");
    std::fs::create_dir_all(&to).expect("a folder");
    for name in ["strait.yaml", "mesh.yaml"] {
        let text = std::fs::read_to_string(from.join(name)).expect("an example");
        // The gateway's ports; the endpoints have other addresses.
        let text = text.replace("\"127.0.0.1:", &format!("\"{address}:"));
        std::fs::write(to.join(name), text).expect("a copy");
    }
}

/// Returns a loopback address that is probably unused, because a gateway's ports are fixed.
fn own_address() -> String {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    format!("127.{}.{low}.77", 200 + high % 50)
}

#[test]
fn the_example_is_clean_with_fresh_certificates_and_warned_of_without() {
    run(async {
        let folder = folder_with_certificates().await;
        copy_of_the_example(folder.path(), "127.0.0.1");
        let args = ["check", "-c", "deploy/local/strait.yaml"];
        let checked = run_command(folder.path(), &args).await;
        assert_eq!((checked.code, checked.stderr.as_str()), (Some(0), ""));
        assert!(checked.stdout.contains("1 service and 2 workloads"));

        std::fs::remove_dir_all(folder.path().join("certs")).expect("a removal");
        let checked = run_command(folder.path(), &args).await;
        assert_eq!(checked.code, Some(0));
        for name in ["gateway.crt", "gateway.key", "root.crt"] {
            assert!(checked.stderr.contains(name), "{name}: {checked:?}");
        }
    });
}

#[test]
fn a_gateway_with_the_example_becomes_ready_and_stops() {
    run(async {
        let folder = folder_with_certificates().await;
        let address = own_address();
        copy_of_the_example(folder.path(), &address);
        let log = std::fs::File::create(folder.path().join("log")).expect("a log");
        let mut gateway = strait()
            .args(["run", "-c", "deploy/local/strait.yaml"])
            .current_dir(folder.path())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("the gateway");
        let ready = format!("http://{address}:15021/healthz/ready");
        let ask = async || {
            let ended = gateway.try_wait().expect("a process");
            let log = std::fs::read_to_string(folder.path().join("log"));
            assert!(ended.is_none(), "{ended:?}: {log:?}");
            get(&ready).await
        };
        until("readiness", ask, |answer| *answer == (200, "ready\n".into())).await;
        let (status, metrics) = get(&format!("http://{address}:15020/metrics")).await;
        assert!(status == 200 && metrics.contains("strait_tunnels_open 0\n"), "{metrics}");
        let (status, dump) = get(&format!("http://{address}:15000/config_dump")).await;
        assert!(status == 200 && dump.contains("echo.global:80"), "{dump}");
        // The second one ends the lag of 5 s, which only load balancers need.
        interrupt(&gateway);
        let lag = async || get(&ready).await;
        until("the drain", lag, |(status, _)| *status == 500).await;
        interrupt(&gateway);
        let ended = gateway.wait().await.expect("an exit status");
        assert_eq!(ended.code(), Some(0));
    });
}
