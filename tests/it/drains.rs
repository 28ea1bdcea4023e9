//! Drains of services, listeners and gateways by an operator, and their file.

use std::fs;

use strait::tools::hbone::{Client, ConnectError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::bindings::{bound, connect, east, echoes};
use crate::support::{
    CLIENT, ECHO, Endpoint, Gateway, Net, Settings, endpoint_port, identities, run, until,
};
use crate::transit::{start_west, west};

const HOST: &str = "echo.app.svc.cluster.local";

/// Gateway with one endpoint, whose file of drains outlives its own folder.
fn settings(net: Net, file: &str) -> Settings<'static> {
    let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
    let deadline = "deadline: 2s";
    settings.more = settings.more.replace(deadline, &format!("{deadline}, file: {file}"));
    settings
}

async fn command(gateway: &Gateway, args: &[&str]) -> String {
    let (code, text, error) = gateway.run_command(args).await;
    assert_eq!(code, 0, "{args:?}: {text}{error}");
    text
}

async fn explained(gateway: &Gateway) -> String {
    let (code, text, error) =
        gateway.run_command(&["explain", "--from", CLIENT, "--to", ECHO]).await;
    assert_eq!(code, 1, "{text}{error}");
    text
}

async fn is_rejected(client: &Client) {
    let refused = client.tunnel(ECHO).await;
    assert!(matches!(&refused, Err(ConnectError::Status(status)) if *status == 503), "{refused:?}");
}

#[test]
fn a_drained_service_rejects_new_tunnels_also_after_a_restart() {
    run(async {
        let (net, folder) = (Net::new(), tempfile::tempdir().expect("a folder"));
        let file = folder.path().join("drains");
        let settings = settings(net, &file.to_string_lossy());
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let gateway = Gateway::start(&settings).await;
        let client = gateway.client(identities()).await;
        let mut open = client.tunnel(ECHO).await.expect("a tunnel");
        let order = ["drain", "service", HOST];
        let text = command(&gateway, &[&order[..], &["--persist"]].concat()).await;
        assert!(text.contains("1 of 2 services are there"), "{text}");
        assert!(text.contains("it ends with --undo, and not by a restart"), "{text}");
        is_rejected(&client).await;
        open.write_all(b"?").await.expect("an open tunnel");
        assert_eq!(open.read_u8().await.expect("an open tunnel"), b'?');
        let metric = "strait_drained{kind=\"service\"}";
        assert_eq!(gateway.metric(metric).await, 1.0);
        assert!(gateway.metric("strait_drained_timestamp_seconds").await > 1e9);
        // An order without --persist ends with the process.
        command(&gateway, &["drain", "endpoint", &net.ip(11).to_string(), "--force"]).await;
        drop((client, open));
        gateway.kill().await;

        let gateway = Gateway::start(&settings).await;
        let client = gateway.client(identities()).await;
        is_rejected(&client).await;
        let why = format!("service {HOST} is evacuated (`strait drain service`)");
        gateway.logged(&why).await;
        let text = explained(&gateway).await;
        assert!(text.contains(&why), "{text}");
        let status = command(&gateway, &["status"]).await;
        let row = status.lines().find(|line| line.contains(HOST) && line.contains("since"));
        let row = row.unwrap_or_else(|| panic!("{status}"));
        assert!(row.contains("Z (") && row.ends_with("kept over restarts"), "{row}");
        assert!(!status.contains("endpoint"), "{status}");
        command(&gateway, &[&order[..], &["--undo"]].concat()).await;
        client.tunnel(ECHO).await.expect("a tunnel");
        assert_eq!(gateway.metric(metric).await, 0.0);
        assert_eq!(fs::read_to_string(&file).expect("a file"), "strait drains 1\n");
    });
}

#[test]
fn a_drained_listener_is_closed_until_it_is_put_back() {
    run(async {
        let (net, folder) = (Net::new(), tempfile::tempdir().expect("a folder"));
        let file = folder.path().join("drains");
        let settings = settings(net, &file.to_string_lossy());
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let gateway = Gateway::start(&settings).await;
        let client = gateway.client(identities()).await;
        client.tunnel(ECHO).await.expect("a tunnel");
        let name = "cross-network";
        let address = net.address(1, 15008);
        let (code, _, error) = gateway.run_command(&["drain", "listener", "other"]).await;
        assert_eq!(code, 1);
        assert!(error.contains(name), "{error}");
        command(&gateway, &["drain", "listener", name, "--persist"]).await;
        client.wait_closed().await.expect("a graceful end");
        assert!(TcpStream::connect(address).await.is_err(), "it accepts a connection");
        assert_eq!(gateway.readiness().await.0, 200);
        let why = format!("listener {name} is evacuated (`strait drain listener`)");
        assert!(explained(&gateway).await.contains(&why));
        gateway.kill().await;

        let gateway = Gateway::start(&settings).await;
        assert!(TcpStream::connect(address).await.is_err(), "it accepts a connection");
        let status = command(&gateway, &["status"]).await;
        assert!(status.contains(&format!("listener {name} is drained since ")), "{status}");
        command(&gateway, &["drain", "listener", name, "--undo"]).await;
        gateway.client(identities()).await.tunnel(ECHO).await.expect("a tunnel");
    });
}

#[test]
fn a_drained_gateway_gets_no_tunnel_while_another_one_takes_them() {
    run(async {
        let (here, nets) = (Net::new(), [Net::new(), Net::new()]);
        let mut donors = Vec::new();
        for net in nets {
            donors.push(start_west(&west(net, &[(11, 1, "TCP")])).await);
        }
        let endpoint = async |net: Net| Endpoint::echo(net.listen(11, endpoint_port()).await);
        let endpoints = [endpoint(nets[0]).await, endpoint(nets[1]).await];
        let settings = east(here, &nets, ", inner: tcp");
        let gateway = Gateway::start(&settings).await;
        let address = nets[0].address(1, 15008).to_string();
        let order = ["drain", "gateway", &address];
        let text = command(&gateway, &order).await;
        assert!(text.contains("1 of 2 gateways are there"), "{text}");
        for _ in 0..20 {
            echoes(&mut connect(bound(here)).await).await;
        }
        assert_eq!(endpoints.each_ref().map(Endpoint::accepted), [0, 20]);
        let binding = bound(here).to_string();
        let (_, text, error) = gateway.run_command(&["explain", "--binding", &binding]).await;
        let why = format!("gateway {address} is evacuated (`strait drain gateway`)");
        assert!(text.contains(&why), "{text}{error}");
        // Without a file no order outlives the process.
        let (code, _, error) = gateway.run_command(&[&order[..], &["--persist"]].concat()).await;
        assert!(code == 1 && error.contains("`drain.file` is not set"), "{error}");
        command(&gateway, &[&order[..], &["--undo"]].concat()).await;
        until(
            "a tunnel through it",
            async || {
                echoes(&mut connect(bound(here)).await).await;
                endpoints[0].accepted()
            },
            |&accepted| accepted > 0,
        )
        .await;
    });
}

#[test]
fn a_file_that_cannot_be_read_is_a_problem_and_no_failed_start() {
    run(async {
        let (net, folder) = (Net::new(), tempfile::tempdir().expect("a folder"));
        let file = folder.path().join("drains");
        fs::write(&file, "nonsense\n").expect("a file");
        let gateway = Gateway::start(&settings(net, &file.to_string_lossy())).await;
        let problem =
            "(`drain.file`) are not in force: its first line is not `strait drains 1`; repeat";
        let status = command(&gateway, &["status"]).await;
        assert!(status.contains(problem), "{status}");
        command(&gateway, &["drain", "service", HOST, "--persist"]).await;
        assert!(!command(&gateway, &["status"]).await.contains(problem));
        let kept = fs::read_to_string(folder.path().join("drains.unreadable"));
        assert_eq!(kept.expect("the old file"), "nonsense\n");
        let text = fs::read_to_string(&file).expect("a file");
        assert!(text.ends_with(&format!(" service {HOST}\n")), "{text}");
    });
}
