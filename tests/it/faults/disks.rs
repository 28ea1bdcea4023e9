//! Logs that are not taken, and disks that are full.

use std::time::Duration;

use rustix::process::Signal;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{all_whole, plans, start};
use crate::support::oracle::Oracle;
use crate::support::{
    ECHO, Endpoint, Gateway, Net, Settings, echoes, endpoint_port, identities, run, skip, until,
};

/// Time of an exit that nothing delays, and some of a loaded machine.
const EXIT_MAX: Duration = Duration::from_secs(15);

/// Runs tunnels through a gateway whose log goes nowhere, until lines of it are lost.
async fn serves_without_its_log(net: Net, settings: &mut Settings<'_>) {
    settings.more += "log: {level: trace}\n";
    let mut gateway = Gateway::start(settings).await;
    let oracle = Oracle::new();
    let _endpoint = oracle.endpoint(net.listen(11, endpoint_port()).await);
    let client = gateway.client(identities()).await;
    let mut first = 0;
    let lost = async || {
        all_whole(&oracle, start(&client, &plans(first..first + 50, 64 * 1024)).await).await;
        first += 50;
        gateway.metric("strait_log_lines_dropped_total").await
    };
    until("lost lines", lost, |&lost| lost > 0.0).await;
    assert_eq!(gateway.readiness().await.0, 200);
    drop(client);
    gateway.signal(Signal::TERM);
    let exited = timeout(EXIT_MAX, gateway.exited()).await;
    assert_eq!(exited.expect("an exit in time").code(), Some(0));
}

/// Runs a script, whose `$0` is `path`, before the gateway.
fn inside(words: &[&str], script: &str, path: &str) -> Vec<String> {
    let words = words.iter().copied().chain(["sh", "-c", script, path]);
    words.map(str::to_owned).collect()
}

#[test]
fn a_log_pipe_that_nobody_reads_delays_no_tunnel_and_its_losses_are_counted() {
    run(async {
        let folder = tempfile::tempdir().expect("a folder");
        let pipe = folder.path().join("log");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.expect("mkfifo").success());
        let both = std::fs::OpenOptions::new().read(true).write(true).open(&pipe);
        let _stalled = both.expect("a reader");
        let net = Net::new();
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        settings.inside = inside(&[], r#"exec "$@" 2>"$0""#, pipe.to_str().expect("UTF-8"));
        serves_without_its_log(net, &mut settings).await;
    });
}

/// Returns whether a test may mount. Otherwise the row is skipped.
fn may_mount(row: &str) -> bool {
    let mount = std::process::Command::new("unshare").args(["-m", "true"]).output();
    let may = mount.is_ok_and(|output| output.status.success());
    if !may {
        skip(row, "no mount namespace can be made here; run it as root");
    }
    may
}

#[test]
fn an_order_that_a_full_disk_does_not_keep_is_in_force_and_an_error() {
    if !may_mount("full disk under the state") {
        return;
    }
    run(async {
        let folder = tempfile::tempdir().expect("a folder");
        let script = r#"mount -t tmpfs -o size=64k none "$0"
cat /dev/zero 2>/dev/null > "$0/all"
exec "$@""#;
        let net = Net::new();
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        let path = folder.path().to_str().expect("UTF-8");
        settings.inside = inside(&["unshare", "-m"], script, path);
        let deadline = "deadline: 2s";
        let stored = format!("{deadline}, file: {path}/drains");
        settings.more = settings.more.replace(deadline, &stored);
        let _endpoint = Endpoint::echo(net.listen(11, endpoint_port()).await);
        let gateway = Gateway::start(&settings).await;
        let order = ["drain", "listener", "cross-network"];
        let (code, _, error) = gateway.run_command(&[&order[..], &["--persist"]].concat()).await;
        assert!(code == 1 && error.contains("No space left on device"), "{error}");
        assert!(TcpStream::connect(gateway.address).await.is_err(), "it accepts a connection");
        let (_, status, _) = gateway.run_command(&["status"]).await;
        assert!(status.contains(&format!("{path}/drains")), "{status}");
        gateway.run_command(&[&order[..], &["--undo"]].concat()).await;
        echoes(&mut gateway.client(identities()).await.tunnel(ECHO).await.expect("a tunnel")).await;
        assert_eq!(gateway.readiness().await.0, 200);
    });
}

#[test]
fn a_full_disk_under_the_log_delays_no_tunnel_and_its_losses_are_counted() {
    if !may_mount("full disk under the log") {
        return;
    }
    run(async {
        let folder = tempfile::tempdir().expect("a folder");
        let script = r#"mount -t tmpfs -o size=64k none "$0" && exec "$@" 2>"$0/log""#;
        let net = Net::new();
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        let path = folder.path().to_str().expect("UTF-8");
        settings.inside = inside(&["unshare", "-m"], script, path);
        serves_without_its_log(net, &mut settings).await;
    });
}
