//! Traffic by region: weights, a reload of them, and evacuation by an operator.

use std::fs;

use strait::tools::hbone::{Client, Tunnel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::{ECHO, Endpoint, Gateway, Net, Settings, identities, replace, run, until};

/// An endpoint that sends its own name and then echoes.
fn named(listener: tokio::net::TcpListener, name: u8) -> Endpoint {
    Endpoint::new(listener, move |mut stream| async move {
        let _ = stream.write_u8(name).await;
        let (mut read, mut write) = stream.split();
        let _ = tokio::io::copy(&mut read, &mut write).await;
    })
}

/// Two endpoints, the first in us-east and the second in us-west, with weights for these.
fn settings(net: Net, weights: &str) -> Settings<'static> {
    let mut settings =
        Settings::new(net, identities()).endpoints(&[(11, 1, "TCP"), (12, 1, "TCP")]);
    let first =
        settings.mesh.replacen("workloadIps", "locality: {region: us-east}, workloadIPs", 1);
    let both = first.replacen("workloadIps", "locality: {region: us-west}, workloadIps", 1);
    settings.mesh = both.replacen("workloadIPs", "workloadIps", 1);
    settings.more +=
        &format!("traffic: [{{service: echo.app.svc.cluster.local, regions: [{weights}]}}]\n");
    settings
}

/// Opens a tunnel. Returns the endpoint that it reached.
async fn tunnel(client: &Client) -> (u8, Tunnel) {
    let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");
    (tunnel.read_u8().await.expect("a name"), tunnel)
}

/// Returns the number of tunnels, of 200 in sequence, that reach the first endpoint.
async fn to_east(client: &Client) -> usize {
    let mut count = 0;
    for _ in 0..200 {
        count += usize::from(tunnel(client).await.0 == 11);
    }
    count
}

async fn status(gateway: &Gateway) -> String {
    let (code, text, _) = gateway.run_command(&["status"]).await;
    assert_eq!(code, 0, "{text}");
    text
}

#[test]
fn regions_share_by_weight_and_are_evacuated_by_a_reload_or_a_command() {
    run(async {
        let net = Net::new();
        let weights = "{region: us-east/*, weight: 3}, {region: us-west, weight: 1}";
        let gateway = Gateway::start(&settings(net, weights)).await;
        let _east = named(net.listen(11, 9000).await, 11);
        let _west = named(net.listen(12, 9000).await, 12);
        let client = gateway.client(identities()).await;
        // Five standard deviations of 150 of 200 are 31.
        let east = to_east(&client).await;
        assert!((119..=181).contains(&east), "{east} of 200");

        // The last tunnel to the east stays open throughout.
        let mut old =
            until("a tunnel to the east", async || tunnel(&client).await, |(name, _)| *name == 11)
                .await
                .1;
        let path = gateway.file("strait.yaml");
        let text = fs::read_to_string(&path).expect("the file");
        replace(&path, &text.replace("weight: 3", "weight: 0"));
        until(
            "the reload",
            async || gateway.metric("strait_reload_total{what=\"config\",result=\"ok\"}").await,
            |&count| count >= 1.0,
        )
        .await;
        assert_eq!(to_east(&client).await, 0);

        // No endpoint remains then, and the operator sees the reason.
        let order = ["drain", "region", "us-west"];
        let forced = [&order[..], &["--force"]].concat();
        let (code, reported, _) = gateway.run_command(&forced).await;
        assert!(code == 0 && reported.contains("no endpoint is left"), "{reported}");
        assert!(status(&gateway).await.contains("us-west is evacuated"));
        assert!(client.tunnel(ECHO).await.is_err());
        assert_eq!(gateway.tunnels("no_endpoint").await, 1.0);
        gateway
            .logged(
                "no endpoint is left: region us-west is evacuated (`strait drain region`); region \
                 us-east is evacuated (weight 0 in `traffic`)",
            )
            .await;

        // A reload does not undo the evacuation, but `--undo` does.
        replace(&path, &text.replace("weight: 3", "weight: 2"));
        until("the east again", async || client.tunnel(ECHO).await.is_ok(), |&is| is).await;
        assert_eq!(to_east(&client).await, 200);
        let undo = [&order[..], &["--undo"]].concat();
        assert_eq!(gateway.run_command(&undo).await.0, 0);
        assert_eq!(gateway.run_command(&undo).await.0, 1, "it is not evacuated any more");
        let east = to_east(&client).await;
        assert!((100..=166).contains(&east), "{east} of 200 by 2 to 1");
        assert!(!status(&gateway).await.contains("Operator"));
        old.write_all(b"?").await.expect("an open tunnel");
        assert_eq!(old.read_u8().await.expect("an open tunnel"), b'?');
    });
}

#[test]
fn a_region_that_nobody_can_mean_is_a_mistake_of_the_command() {
    run(async {
        let net = Net::new();
        let gateway = Gateway::start(&settings(net, "{region: us-east, weight: 1}")).await;
        for args in [
            &["drain", "region", "*"][..],
            &["drain", "region", "a//b"],
            &["drain", "region", "us-east", "--undo", "--force"],
            &["drain"],
        ] {
            assert_eq!(gateway.run_command(args).await.0, 2, "{args:?}");
        }
    });
}

#[test]
fn a_region_that_the_mesh_does_not_name_is_an_error_that_lists_the_known_ones() {
    run(async {
        let net = Net::new();
        let weights = "{region: us-east, weight: 1}, {region: us-west, weight: 1}";
        let gateway = Gateway::start(&settings(net, weights)).await;
        for more in [&[][..], &["--dry-run"], &["--force"]] {
            let order = [&["drain", "region", "us-esat"], more].concat();
            let (code, reported, error) = gateway.run_command(&order).await;
            let want = "region us-esat cannot be evacuated: no workload is there; write one of \
                        us-east, us-west\n";
            assert_eq!((code, &*reported, &*error), (1, "", want), "{more:?}");
        }
        assert!(!status(&gateway).await.contains("evacuated"));
        assert_eq!(gateway.run_command(&["drain", "region", "us-east"]).await.0, 0);
        let undo = ["drain", "region", "us-esat", "--undo"];
        let (code, reported, error) = gateway.run_command(&undo).await;
        let want = "region us-esat was not evacuated by an operator; these are: region us-east\n";
        assert_eq!((code, &*reported, &*error), (1, "", want));
        assert!(status(&gateway).await.contains("us-east is evacuated"));
    });
}

#[test]
fn a_drain_that_leaves_a_service_without_endpoints_names_it_and_needs_force() {
    run(async {
        let net = Net::new();
        let weights = "{region: us-east, weight: 1}, {region: us-west, weight: 1}";
        let mut settings = settings(net, weights);
        settings.more += "names: {aliases: [{name: \"west.echo:80\", region: us-west, \
                          to: \"echo.app.svc.cluster.local:80\"}]}\n";
        let gateway = Gateway::start(&settings).await;
        let _west = named(net.listen(12, 9000).await, 12);
        let client = gateway.client(identities()).await;
        // The services still have endpoints in us-west, and no alias is for us-east.
        let east = ["drain", "region", "us-east"];
        let (code, reported, _) = gateway.run_command(&[&east[..], &["--dry-run"]].concat()).await;
        assert!(code == 0 && reported.ends_with("nothing was changed\n"), "{reported}");
        assert!(!status(&gateway).await.contains("is evacuated"));
        assert_eq!(gateway.run_command(&east).await.0, 0);

        let west = ["drain", "region", "us-west"];
        for more in [&[][..], &["--dry-run"]] {
            let (code, reported, error) = gateway.run_command(&[&west[..], more].concat()).await;
            assert_eq!((code, &*reported), (1, ""), "{more:?}");
            for part in [
                "region us-west is not evacuated: no endpoint would be left for ",
                "alias west.echo:80@us-west, ",
                "app/echo.app.svc.cluster.local",
                "; write --force ",
            ] {
                assert!(error.contains(part), "{part}: {error}");
            }
        }
        assert_eq!(tunnel(&client).await.0, 12);
        let (code, reported, _) = gateway.run_command(&[&west[..], &["--force"]].concat()).await;
        assert_eq!(code, 0, "{reported}");
        assert!(reported.contains("app/echo.app.svc.cluster.local"), "{reported}");
        assert!(client.tunnel(ECHO).await.is_err());
    });
}

#[test]
fn clusters_and_endpoints_are_evacuated_as_regions_are() {
    run(async {
        let net = Net::new();
        let weights = "{region: us-east, weight: 1}, {region: us-west, weight: 1}";
        let mut settings = settings(net, weights);
        // The last of the two workloads is that of another cluster.
        let last = settings.mesh.rfind("clusterId: east").expect("a workload");
        settings.mesh.replace_range(last.., &settings.mesh[last..].replacen("east", "moon", 1));
        let gateway = Gateway::start(&settings).await;
        let _first = named(net.listen(11, 9000).await, 11);
        let _last = named(net.listen(12, 9000).await, 12);
        let client = gateway.client(identities()).await;
        let (_, mut open) = tunnel(&client).await;
        let address = net.ip(12).to_string();
        for (kind, name) in [("cluster", "moon"), ("endpoint", address.as_str())] {
            let order = ["drain", kind, name];
            let (code, reported, _) = gateway.run_command(&order).await;
            assert!(code == 0 && reported.contains("1 of 2 workloads are there"), "{reported}");
            let metric = format!("strait_drained{{kind=\"{kind}\"}}");
            assert_eq!(gateway.metric(&metric).await, 1.0);
            assert!(status(&gateway).await.contains(&format!("{kind} {name} is evacuated")));
            assert_eq!(to_east(&client).await, 200, "{kind} {name}");
            let undo = [&order[..], &["--undo"]].concat();
            assert_eq!(gateway.run_command(&undo).await.0, 0);
            assert!((1..200).contains(&to_east(&client).await), "{kind} {name}");
        }
        open.write_all(b"?").await.expect("an open tunnel");
        assert_eq!(open.read_u8().await.expect("an open tunnel"), b'?');
    });
}
