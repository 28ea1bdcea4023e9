//! `strait check`: names that do not lead their consumers to a reachable service.

use std::path::Path;

use tempfile::TempDir;

use crate::check::{GOOD, GOOD_MESH, check};
use crate::support::{CommandOutput, folder_with_certificates, run, run_command, write};

const MESH: &str = "\
services:
  - {name: echo, namespace: app, hostname: echo.app.svc.cluster.local, vips: [], ports: {80: 8080}}
  - {name: shop, namespace: app, hostname: shop.app.svc.cluster.local, vips: [], ports: {80: 8080}}
workloads:
  - {uid: a, name: a, namespace: app, network: east, workloadIps: [10.0.0.1], protocol: HBONE,
     services: {app/echo.app.svc.cluster.local: {80: 8080},
       app/shop.app.svc.cluster.local: {80: 8080}}}
";

async fn folder() -> TempDir {
    let folder = folder_with_certificates().await;
    write(folder.path(), "mesh.yaml", MESH);
    folder
}

/// Checks a configuration with these sections, which begin on line 8.
async fn checked(folder: &Path, discovery: &str, sections: &str) -> CommandOutput {
    let text = format!(
        "\
gateway: {{cluster: east, network: east}}
identity: {{kind: files, chain: certs/gateway.crt, key: certs/gateway.key, roots: certs/root.crt}}
trust:
  domains: [{{name: east.local, cluster: east}}, {{name: west.local, cluster: west}},
    {{name: north.local, cluster: north}}]
listeners: [{{name: cross-network, bind: \"127.0.0.1:15008\"}}]
discovery: {discovery}
{sections}"
    );
    write(folder, "strait.yaml", &text);
    let checked = run_command(folder, &["check", "-c", "strait.yaml"]).await;
    assert_eq!(checked.code, Some(0), "{checked:?}");
    checked
}

const FILE: &str = "{kind: file, path: mesh.yaml}";
const ISTIO: &str = "{kind: istio, address: \"istiod:15012\", roots: certs/root.crt}";

#[test]
fn an_alias_for_a_consumer_that_may_not_reach_its_target_is_a_warning() {
    run(async {
        let folder = folder().await;
        let exposure = "exposure:
  services:
    - {service: \"echo.app.svc.cluster.local:80\", to: [{cluster: west, namespaces: [a]}]}
names:
  aliases:
";
        let target = "to: \"echo.app.svc.cluster.local:80\"";
        let north =
            format!("    - {{name: \"a.global:80\", {target}, consumers: [west, north]}}\n");
        let want = "strait.yaml:13: warning: the alias a.global is for north, whose peers may not \
                    reach echo.app.svc.cluster.local:80; add {cluster: north} to `to` of \
                    exposure.services[0] (line 10)\n";
        for discovery in [FILE, ISTIO] {
            let found = checked(folder.path(), discovery, &format!("{exposure}{north}")).await;
            assert_eq!(found.stderr, want, "{discovery}");
        }
        // A service without an entry is not exposed, unless a control plane exports it.
        let shop = "    - {name: \"b.global:80\", to: [\"shop.app.svc.cluster.local:80\"]}\n";
        let want = "strait.yaml:13: warning: the alias b.global leads to \
                    shop.app.svc.cluster.local:80, which no peer may reach; add an entry for \
                    \"shop.app.svc.cluster.local:80\" ";
        let found = checked(folder.path(), FILE, &format!("{exposure}{shop}")).await;
        assert!(found.stderr.starts_with(want), "{found:?}");
        let found = checked(folder.path(), ISTIO, &format!("{exposure}{shop}")).await;
        assert_eq!(found.stderr, "");
        // A link is missing too. Correct entries are not reported.
        let west = format!("    - {{name: \"a.global:80\", {target}, consumers: [west]}}\n");
        let found = checked(folder.path(), FILE, &format!("{exposure}{west}")).await;
        assert_eq!(found.stderr, "");
        let links = "links: [{from: north, to: east}]\n";
        let found = checked(folder.path(), FILE, &format!("{exposure}{west}{links}")).await;
        let want = "strait.yaml:13: warning: the alias a.global is for west, which has no link to \
                    this cluster; add {from: west, to: east} to `links`\n";
        assert_eq!(found.stderr, want);
    });
}

#[test]
fn an_alias_of_a_service_that_the_default_does_not_expose_is_a_warning() {
    run(async {
        let folder = folder().await;
        let private = MESH.replace("hostname: shop", "visibility: Namespace, hostname: shop");
        assert_ne!(private, MESH);
        write(folder.path(), "mesh.yaml", &private);
        let alias = |name: &str| {
            format!(
                "exposure: {{default: all}}\nnames: {{aliases: [{{name: \"b.global:80\", to: \
                 \"{name}.app.svc.cluster.local:80\"}}]}}\n"
            )
        };
        let found = checked(folder.path(), FILE, &alias("echo")).await;
        assert!(!found.stderr.contains("the alias"), "{found:?}");
        let want = "the alias b.global leads to shop.app.svc.cluster.local:80, which no peer may \
                    reach; add an entry for \"shop.app.svc.cluster.local:80\" ";
        let found = checked(folder.path(), FILE, &alias("shop")).await;
        assert!(found.stderr.contains(want), "{found:?}");
    });
}

#[test]
fn two_entries_of_a_service_with_different_names_are_a_warning() {
    run(async {
        let folder = folder().await;
        let entries = |west: &str, north: &str| {
            let service = "service: \"echo.app.svc.cluster.local:80\"";
            format!(
                "exposure:\n  services:\n    - {{{service}, to: [{{cluster: west}}]{west}}}\n    - \
                 {{{service}, to: [{{cluster: north}}]{north}}}\n"
            )
        };
        let warned = async |west: &str, north: &str| {
            let found = checked(folder.path(), FILE, &entries(west, north)).await;
            found.stderr
        };
        let (one, other) = (", names: [\"a.global:80\"]", ", names: [\"b.global:80\"]");
        let want = "strait.yaml:11: warning: `exposure.services[]` has other `names` for \
                    `echo.app.svc.cluster.local:80` than line 10, and a name admits only the peers \
                    of its own entry; write the same `names` into both entries, or each name with \
                    its `consumers` into `names.aliases`\n";
        for (west, north) in [(one, ""), ("", one), (one, other)] {
            assert_eq!(warned(west, north).await, want);
        }
        assert_eq!(warned(one, ", names: [a.global]").await, "");
        assert_eq!(warned("", "").await, "");
    });
}

#[test]
fn a_region_of_another_network_is_reported_only_without_transit() {
    run(async {
        let folder = folder_with_certificates().await;
        let mesh = GOOD_MESH.to_owned()
            + "  - uid: west//Pod/app/echo-2
    namespace: app
    clusterId: west
    network: west
    workloadIps: [10.0.0.2]
    locality: {region: us-west-2}
    networkGateway: {destination: west/192.0.2.7}
    services:
      app/echo.app.svc.cluster.local: {80: 8080}
  - uid: NetworkGateway/west/192.0.2.7/15008
    namespace: istio-system
    clusterId: west
    network: west
    workloadIps: [192.0.2.7]
    locality: {region: us-west-2}
    services: {}
";
        write(folder.path(), "mesh.yaml", &mesh);
        for (transit, is_reported) in [("off", true), ("failover", false)] {
            let config =
                GOOD.replacen("exposure:\n", &format!("exposure:\n  transit: {transit}\n"), 1);
            let alias = "names: {aliases: [{name: echo.west, to: \
                         echo.app.svc.cluster.local, region: us-west-2}]}\n";
            write(folder.path(), "strait.yaml", &format!("{config}{alias}"));
            let checked = check(folder.path()).await;
            let want = "the alias echo.west is for region us-west-2, which has no endpoint that \
                        its peers may use";
            assert_eq!(checked.stderr.contains(want), is_reported, "{checked:?}");
            let listed = "strait.yaml:15: warning: `exposure.transit` lets peers reach other";
            assert_eq!(checked.stderr.contains(listed), !is_reported, "{checked:?}");
            assert_eq!(checked.stderr.lines().count(), 1, "{checked:?}");
        }
    });
}
