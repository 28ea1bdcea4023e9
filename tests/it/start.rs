//! Time before the gateway is ready, extended by a mesh file that is a pipe. The mesh is loaded
//! when the test has written it.

use std::process::Command;

use rustix::process::Signal;
use tokio::time::{Duration, timeout};

use crate::support::{Gateway, Net, Settings, identities, replace, run, until};

/// A gateway that has its configuration and waits for its mesh.
async fn held(settings: &Settings<'_>) -> Gateway {
    let gateway = Gateway::spawn(settings, |folder| {
        let mesh = folder.join("mesh.yaml");
        std::fs::remove_file(&mesh).expect("no plain file");
        let made = Command::new("mkfifo").arg(&mesh).status();
        assert!(made.expect("mkfifo").success());
    });
    let pending = "not ready, pending: certificates, discovery, listeners\n";
    let wanted = (500, pending.to_owned());
    until(
        "a start that says what is pending",
        async || gateway.readiness().await,
        |answer| *answer == wanted,
    )
    .await;
    gateway
}

async fn release(gateway: &mut Gateway, settings: &Settings<'_>) {
    std::fs::write(gateway.file("mesh.yaml"), &settings.mesh).expect("a mesh");
    gateway.ready().await;
}

#[test]
fn readiness_names_what_is_pending_until_all_is_there() {
    run(async {
        let settings = Settings::new(Net::new(), identities());
        let mut gateway = held(&settings).await;
        assert_eq!(gateway.http(15020, "GET", "/metrics").await.0, 0);
        release(&mut gateway, &settings).await;
        assert_eq!(gateway.readiness().await.1, "ready\n");
    });
}

#[test]
fn a_file_that_changes_while_others_are_loaded_is_applied() {
    run(async {
        let settings = Settings::new(Net::new(), identities());
        let mut gateway = held(&settings).await;
        let config = std::fs::read_to_string(gateway.file("strait.yaml")).expect("a file");
        let changed = config.replace("cluster: west}]", "cluster: west, namespaces: [bank]}]");
        assert_ne!(config, changed);
        replace(&gateway.file("strait.yaml"), &changed);
        release(&mut gateway, &settings).await;
        let reloaded = "strait_reload_total{what=\"config\",result=\"ok\"}";
        until(
            "a reload of the changed file",
            async || gateway.metric(reloaded).await,
            |&now| now == 1.0,
        )
        .await;
        let (_, dump) = gateway.http(15000, "GET", "/config_dump").await;
        assert!(dump.contains("\"bank\""), "{dump}");
    });
}

#[test]
fn a_signal_ends_a_start_at_once() {
    run(async {
        for signal in [Signal::TERM, Signal::INT] {
            let mut gateway = held(&Settings::new(Net::new(), identities())).await;
            gateway.signal(signal);
            // Nothing is open that would have to drain; a loaded machine may need a moment.
            let exited = timeout(Duration::from_secs(5), gateway.exited()).await;
            let code = exited.expect("a prompt end").code();
            assert_eq!(code, Some(0), "{}", gateway.log());
            assert!(gateway.log().contains("stopped during startup"));
        }
    });
}

/// The allocator has the options of .cargo/config.toml, also in builds elsewhere.
#[test]
fn a_thread_returns_freed_memory_to_the_system() {
    run(async {
        let settings = Settings::new(Net::new(), identities());
        let gateway = Gateway::start(&settings).await;
        let names = gateway.thread_names();
        assert!(names.iter().any(|name| name == "jemalloc_bg_thd"), "{names:?}");
    });
}
