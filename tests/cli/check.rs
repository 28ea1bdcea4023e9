//! `strait check`: every mistake with its line, and the exit codes.

use std::path::Path;

use crate::support::{CommandOutput, folder_with_certificates, run, run_command, write};

pub const GOOD: &str = "\
gateway: {cluster: east, network: east}
identity:
  kind: files
  chain: certs/gateway.crt
  key: certs/gateway.key
  roots: certs/root.crt
trust:
  domains:
    - {name: east.local, cluster: east}
    - {name: west.local, cluster: west}
listeners:
  - {name: cross-network, bind: \"127.0.0.1:15008\"}
discovery: {kind: file, path: mesh.yaml}
exposure:
  services:
    - service: echo.app.svc.cluster.local:80
      to: [{cluster: west, namespaces: [shop]}]
drain: {lag: 5s}
log: {level: info}
";

pub const GOOD_MESH: &str = "\
services:
  - name: echo
    namespace: app
    hostname: echo.app.svc.cluster.local
    vips: [east/240.0.0.1]
    ports: {80: 8080}
workloads:
  - uid: east//Pod/app/echo-1
    name: echo-1
    namespace: app
    network: east
    workloadIps: [10.0.0.1]
    protocol: HBONE
    capacity: 1
    services:
      app/echo.app.svc.cluster.local: {80: 8080}
";

/// Replacement of a line of a file.
pub type Plant = (usize, &'static str, &'static str);

/// Returns the text with mistakes: each line number with the old and the new text.
pub fn planted(text: &str, plants: &[Plant]) -> String {
    let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
    for (number, old, new) in plants {
        let line = &mut lines[number - 1];
        assert!(line.contains(old), "line {number} is {line}");
        *line = line.replacen(old, new, 1);
    }
    lines.join("\n") + "\n"
}

/// Returns the places that `strait check` names, as `FILE:LINE`, sorted.
fn places(checked: &CommandOutput) -> Vec<String> {
    let mut places: Vec<_> = checked
        .stderr
        .lines()
        .filter_map(|line| Some(line.split_once(": error: ")?.0.to_owned()))
        .collect();
    places.sort();
    places
}

pub async fn check(folder: &Path) -> CommandOutput {
    run_command(folder, &["check", "-c", "strait.yaml"]).await
}

#[test]
fn ten_planted_mistakes_in_two_files_are_all_named() {
    run(async {
        let folder = folder_with_certificates().await;
        let settings = [
            (1, "network: east", "netwrok: east"),
            (10, "west.local", "'*'"),
            (12, "127.0.0.1:15008", "localhost:15008"),
            (18, "5s", "5 parsecs"),
            (19, "info", "inof"),
        ];
        let mesh = [
            (5, "east/240.0.0.1", "240.0.0.1"),
            (6, "80: 8080", "80: 80800"),
            (12, "10.0.0.1", "10.0.0"),
            (13, "HBONE", "QUIC"),
            (14, "capacity: 1", "capacity: -1"),
        ];
        write(folder.path(), "strait.yaml", &planted(GOOD, &settings));
        write(folder.path(), "mesh.yaml", &planted(GOOD_MESH, &mesh));
        let checked = check(folder.path()).await;
        assert_eq!(checked.code, Some(1), "{checked:?}");
        let place = |file: &'static str| move |(line, _, _): &Plant| format!("{file}:{line}");
        let wanted = mesh.iter().map(place("mesh.yaml"));
        let mut wanted: Vec<_> = wanted.chain(settings.iter().map(place("strait.yaml"))).collect();
        wanted.sort();
        assert_eq!(places(&checked), wanted, "{}", checked.stderr);
        for line in checked.stderr.lines().filter(|line| line.contains(": error: ")) {
            assert!(line.contains("; write "), "{line}");
        }
        assert!(checked.stderr.ends_with("strait.yaml: 10 mistakes\n"));
        assert_eq!(checked.stdout, "");
    });
}

#[test]
fn a_clean_pair_exits_0_and_says_what_is_in_it() {
    run(async {
        let folder = folder_with_certificates().await;
        write(folder.path(), "strait.yaml", GOOD);
        write(folder.path(), "mesh.yaml", GOOD_MESH);
        let checked = check(folder.path()).await;
        assert_eq!(checked.code, Some(0), "{checked:?}");
        assert_eq!(checked.stderr, "");
        let wanted = "strait.yaml: ok: 1 listener, 2 trust domains, 1 exposed service, \
                      1 service and 1 workload in the mesh\n";
        assert_eq!(checked.stdout, wanted);
    });
}

#[test]
fn tls_listeners_that_lead_nowhere_are_warned_of() {
    run(async {
        let folder = folder_with_certificates().await;
        write(folder.path(), "mesh.yaml", GOOD_MESH);
        let more = "listeners:
  - {name: istio, bind: \"127.0.0.1:15443\", protocol: tls, routing: istio}
  - name: routes
    bind: \"127.0.0.1:15012\"
    protocol: tls
    routes:
      - {sni: [a], to: \"no.app:80\"}
      - {sni: [b], to: \"echo.app.svc.cluster.local:81\"}
      - {sni: [c], to: \"echo.app.svc.cluster.local:80\"}";
        write(folder.path(), "strait.yaml", &GOOD.replacen("listeners:", more, 1));
        let checked = check(folder.path()).await;
        assert_eq!(checked.code, Some(0), "{checked:?}");
        let found: Vec<_> = checked.stderr.lines().collect();
        let line = 1 + GOOD.lines().position(|line| line == "listeners:").expect("it");
        let wanted = [
            format!("strait.yaml:{}: warning: no.app is not a service of the mesh", line + 6),
            format!(
                "strait.yaml:{}: warning: echo.app.svc.cluster.local:81 is not a port",
                line + 7
            ),
            format!("strait.yaml:{}: warning: listener `istio` reaches no service", line + 1),
        ];
        assert_eq!(found.len(), wanted.len(), "{found:?}");
        for (found, wanted) in found.iter().zip(wanted) {
            assert!(found.starts_with(&wanted), "{found}");
        }
    });
}

#[test]
fn names_that_lead_nowhere_or_elsewhere_are_reported() {
    run(async {
        let folder = folder_with_certificates().await;
        write(folder.path(), "mesh.yaml", GOOD_MESH);
        let check_with = async |more: &str| {
            write(folder.path(), "strait.yaml", &format!("{GOOD}{more}"));
            check(folder.path()).await
        };
        let line = GOOD.lines().count() + 3;
        let more = "names:
  aliases:
    - {name: \"echo.global:80\", to: [echo.app.global, gone.app.global]}
    - {name: echo.west, to: \"echo.app.mesh.internal:81\"}
    - {name: echo.south, to: echo.app.mesh.internal, region: sa-east-1}
";
        let checked = check_with(more).await;
        assert_eq!(checked.code, Some(0), "{checked:?}");
        let found: Vec<_> = checked.stderr.lines().collect();
        let wanted = [
            "echo.global leads to gone.app.global, which is not a service of the mesh",
            "echo.west leads to port 81 of echo.app.mesh.internal, which has no such port",
            "echo.south is for region sa-east-1, which has no endpoint",
        ];
        assert_eq!(found.len(), wanted.len(), "{found:?}");
        for (at, (found, wanted)) in found.iter().zip(wanted).enumerate() {
            let wanted = format!("strait.yaml:{}: warning: the alias {wanted}", line + at);
            assert!(found.starts_with(&wanted), "{found}");
        }
        let own = "names:\n  aliases:\n    - {name: other.app.svc.cluster.local, to: a.b}\n";
        let mesh = GOOD_MESH.replacen(
            "services:\n",
            "services:\n  - {name: other, namespace: \
                                      app, hostname: other.app.svc.cluster.local, vips: [], \
                                      ports: {80: 80}}\n",
            1,
        );
        write(folder.path(), "mesh.yaml", &mesh);
        let checked = check_with(own).await;
        assert_eq!(checked.code, Some(0), "tenants write services: {checked:?}");
        let wanted = format!(
            "strait.yaml:{line}: warning: the alias other.app.svc.cluster.local is a service's own"
        );
        assert!(checked.stderr.contains(&wanted), "{}", checked.stderr);
    });
}

#[test]
fn an_entry_that_another_name_of_its_service_hides_is_warned_of() {
    run(async {
        let folder = folder_with_certificates().await;
        write(folder.path(), "mesh.yaml", GOOD_MESH);
        let entry = "    - {service: echo.app.global, to: [{cluster: west}]}\ndrain:";
        let text = GOOD.replacen("drain:", entry, 1);
        write(folder.path(), "strait.yaml", &text);
        let checked = check(folder.path()).await;
        assert_eq!(checked.code, Some(0), "{checked:?}");
        let wanted = "warning: echo.app.global is the service echo.app.svc.cluster.local, which \
                      has entries of its own that count alone";
        assert!(checked.stderr.contains(wanted), "{}", checked.stderr);
        // Only another name of its family is exposed, which is correct.
        let alone = GOOD.replace("echo.app.svc.cluster.local:80", "echo.app.global:80");
        write(folder.path(), "strait.yaml", &alone);
        assert_eq!(check(folder.path()).await.stderr, "");
    });
}

#[test]
fn a_certificate_that_will_be_issued_is_not_asked_for() {
    run(async {
        let folder = folder_with_certificates().await;
        write(folder.path(), "mesh.yaml", GOOD_MESH);
        let files = "  kind: files\n  chain: certs/gateway.crt\n  key: certs/gateway.key\n  \
                     roots: certs/root.crt\n";
        assert!(GOOD.contains(files));
        // Nothing listens there.
        let authority = "  kind: istio-ca\n  address: \"127.0.0.1:1\"\n  roots: certs/root.crt\n  \
                         namespace: istio-system\n  service_account: eastwest\n  \
                         trust_domain: east.local\n";
        for issued in [authority, "  kind: spiffe\n"] {
            write(folder.path(), "strait.yaml", &GOOD.replace(files, issued));
            let checked = check(folder.path()).await;
            assert_eq!(checked.code, Some(0), "{checked:?}");
            assert_eq!(checked.stderr, "");
        }
    });
}

#[test]
fn wrong_usage_exits_2_and_a_file_that_is_not_there_1_with_its_name() {
    run(async {
        let folder = tempfile::tempdir().expect("a folder");
        for args in [
            &["check", "--no-such-flag"][..],
            &["check", "strait.yaml"],
            &["demo", "--kill", "3"],
            &["certs"],
            &["no-such-command"],
            &[],
        ] {
            let refused = run_command(folder.path(), args).await;
            assert_eq!(refused.code, Some(2), "{args:?}: {refused:?}");
            assert!(refused.stderr.contains("--help"), "{refused:?}");
        }
        for command in ["check", "run"] {
            let missing = run_command(folder.path(), &[command, "-c", "nowhere.yaml"]).await;
            assert_eq!(missing.code, Some(1), "{missing:?}");
            let line = "nowhere.yaml:1: error: the file cannot be read: No such file";
            assert!(missing.stderr.starts_with(line), "{missing:?}");
        }
    });
}

#[test]
fn a_certificate_that_cannot_be_used_is_named_where_it_is_configured() {
    run(async {
        let folder = folder_with_certificates().await;
        write(folder.path(), "mesh.yaml", GOOD_MESH);
        write(folder.path(), "not-pem", "not PEM\n");
        let cases = [
            ((5, "gateway.key", "client.key"), "certs/client.key: the private key does not match"),
            ((5, "certs/gateway.key", "not-pem"), "not-pem: cannot be read as PEM"),
            ((4, "certs/gateway.crt", "not-pem"), "not-pem: contains no certificate"),
            ((4, "gateway.crt", "root.crt"), "certs/root.crt: not a workload certificate"),
            ((6, "certs/root.crt", "not-pem"), "not-pem: contains no certificate"),
            ((10, "west}", "west, roots: not-pem}"), "not-pem: contains no certificate"),
            ((6, "root.crt", "lost.crt"), "`identity.roots` is `certs/lost.crt`: No such file"),
        ];
        for (plant, what) in cases {
            write(folder.path(), "strait.yaml", &planted(GOOD, &[plant]));
            let checked = check(folder.path()).await;
            assert_eq!(checked.code, Some(1), "{checked:?}");
            let wanted = format!("strait.yaml:{}: error: {what}", plant.0);
            assert!(checked.stderr.starts_with(&wanted), "{wanted}: {checked:?}");
            assert_eq!(places(&checked).len(), 1, "{checked:?}");
        }
    });
}

#[test]
fn a_mistake_in_one_file_hides_none_in_the_others() {
    run(async {
        let folder = folder_with_certificates().await;
        write(folder.path(), "not-pem", "not PEM\n");
        write(folder.path(), "nor-this", "not PEM\n");
        let settings = [
            (5, "certs/gateway.key", "not-pem"),
            (10, "west}", "west, roots: nor-this}"),
            (19, "info", "inof"),
        ];
        write(folder.path(), "strait.yaml", &planted(GOOD, &settings));
        let mesh = planted(GOOD_MESH, &[(13, "HBONE", "QUIC")]);
        write(folder.path(), "mesh.yaml", &mesh);
        let places = places(&check(folder.path()).await);
        let wanted = ["mesh.yaml:13", "strait.yaml:10", "strait.yaml:19", "strait.yaml:5"];
        assert_eq!(places, wanted);
    });
}

#[test]
fn a_private_key_that_everybody_may_read_is_a_warning_at_its_line() {
    use std::os::unix::fs::PermissionsExt;
    run(async {
        let folder = folder_with_certificates().await;
        write(folder.path(), "strait.yaml", GOOD);
        write(folder.path(), "mesh.yaml", GOOD_MESH);
        let key = folder.path().join("certs/gateway.key");
        let allow = |mode| std::fs::set_permissions(&key, PermissionsExt::from_mode(mode));
        allow(0o604).expect("a mode");
        let checked = check(folder.path()).await;
        assert_eq!(checked.code, Some(0), "{checked:?}");
        let wanted = "strait.yaml:5: warning: private key certs/gateway.key is accessible to every \
                      user (mode 0604); run `chmod o-rwx`\n";
        assert_eq!(checked.stderr, wanted);
        allow(0o640).expect("a mode");
        assert_eq!(check(folder.path()).await.stderr, "");
    });
}

#[test]
fn an_exposure_that_leads_nowhere_is_a_warning_at_its_line() {
    run(async {
        let folder = folder_with_certificates().await;
        let cases = [
            (planted(GOOD, &[(16, ":80", ":81")]), GOOD_MESH.to_owned(), "has no port 81"),
            (
                GOOD.to_owned(),
                planted(GOOD_MESH, &[(11, "east", "west")]),
                "has no endpoint in network east",
            ),
            (
                GOOD.to_owned(),
                planted(GOOD_MESH, &[(12, "10.0.0.1", "127.0.0.9")]),
                "has an endpoint at a loopback address",
            ),
        ];
        for (config, mesh, wanted) in cases {
            write(folder.path(), "strait.yaml", &config);
            write(folder.path(), "mesh.yaml", &mesh);
            let checked = check(folder.path()).await;
            let warned = checked
                .stderr
                .lines()
                .any(|line| line.contains("strait.yaml:16: warning: ") && line.contains(wanted));
            assert!(warned && checked.code == Some(0), "{wanted}: {checked:?}");
        }
    });
}

#[test]
fn a_waypoint_that_is_no_service_is_a_warning_at_the_line_of_what_is_behind_it() {
    run(async {
        let folder = folder_with_certificates().await;
        write(folder.path(), "strait.yaml", GOOD);
        let behind = "    ports: {80: 8080}\n    waypoint: {destination: app/nobody.app}\n";
        let mesh = GOOD_MESH.replacen("    ports: {80: 8080}\n", behind, 1);
        write(folder.path(), "mesh.yaml", &mesh);
        let checked = check(folder.path()).await;
        let warned = checked.stderr.lines().any(|line| {
            line.starts_with("mesh.yaml:2: warning: ")
                && line.contains("`app/nobody.app`")
                && line.contains("; write ")
        });
        assert!(warned && checked.code == Some(0), "{checked:?}");
    });
}

#[test]
fn objects_are_checked_with_the_other_files() {
    run(async {
        let folder = folder_with_certificates().await;
        let config = GOOD.replace("exposure:\n", "exposure:\n  files: [objects]\n");
        write(folder.path(), "strait.yaml", &config);
        write(folder.path(), "mesh.yaml", &planted(GOOD_MESH, &[(6, "ports", "prots")]));
        std::fs::create_dir(folder.path().join("objects")).expect("a folder");
        let objects = "apiVersion: multicluster.x-k8s.io/v1alpha1\nkind: ServiceExport\n\
                       metadata: {name: nobody, namespace: app}\n";
        write(folder.path(), "objects/a.yaml", objects);
        write(folder.path(), "objects/b.json", "{\"apiVersion\": \"v1\",\n\"kind\": [1]}");
        let checked = check(folder.path()).await;
        let places = places(&checked);
        assert_eq!(places.last().map(String::as_str), Some("objects/b.json:2"), "{checked:?}");
        assert!(places.iter().any(|place| place.starts_with("mesh.yaml:")), "{checked:?}");
        std::fs::remove_file(folder.path().join("objects/b.json")).expect("no bad file");
        write(folder.path(), "mesh.yaml", GOOD_MESH);
        let checked = check(folder.path()).await;
        let wanted = "objects/a.yaml:1: warning: the export of app/nobody has no effect: no such \
                      Service";
        assert!(checked.stderr.contains(wanted), "{checked:?}");
        assert_eq!(checked.code, Some(0), "{checked:?}");
    });
}

#[test]
fn a_trust_set_without_our_own_domain_is_a_warning() {
    run(async {
        let folder = folder_with_certificates().await;
        let config = GOOD.replace("    - {name: east.local, cluster: east}\n", "");
        write(folder.path(), "strait.yaml", &config);
        write(folder.path(), "mesh.yaml", GOOD_MESH);
        let checked = check(folder.path()).await;
        let wanted = "warning: the gateway's certificate is of east.local, which is not in \
                      trust.domains";
        assert!(checked.stderr.contains(wanted), "{checked:?}");
        assert!(checked.stderr.starts_with("strait.yaml:"), "{checked:?}");
    });
}

#[test]
fn a_file_without_its_option_gets_a_hint() {
    run(async {
        let folder = tempfile::tempdir().expect("a folder");
        let checked = run_command(folder.path(), &["check", "deploy.yaml"]).await;
        assert_eq!(checked.code, Some(2), "{checked:?}");
        assert!(checked.stderr.contains("write `-c deploy.yaml`"), "{checked:?}");
    });
}

#[test]
fn weights_for_regions_where_nothing_is_are_reported() {
    run(async {
        let folder = folder_with_certificates().await;
        let mesh = GOOD_MESH.replacen("  - uid:", "  - locality: {region: us-east}\n    uid:", 1);
        assert_ne!(mesh, GOOD_MESH);
        write(folder.path(), "mesh.yaml", &mesh);
        let regions = [("us-east/*", 1), ("*", 1), ("us-esat", 1), ("us-west", 0)];
        let regions =
            regions.map(|(name, weight)| format!("{{region: {name:?}, weight: {weight}}}"));
        let more = format!("traffic: [{{service: \"*\", regions: [{}]}}]\n", regions.join(", "));
        write(folder.path(), "strait.yaml", &format!("{GOOD}{more}"));
        let checked = check(folder.path()).await;
        assert_eq!(checked.code, Some(0), "{checked:?}");
        let want = format!(
            "strait.yaml:{}: warning: `traffic` has unknown region us-esat: no workload of \
             mesh.yaml is in it; write one of its regions\n",
            GOOD.lines().count() + 1
        );
        assert_eq!(checked.stderr, want);
    });
}

#[test]
fn what_objects_export_is_counted_and_endpoints_without_a_port_are_reported() {
    run(async {
        let folder = folder_with_certificates().await;
        write(folder.path(), "mesh.yaml", GOOD_MESH);
        let more = GOOD.replacen("exposure:\n", "exposure:\n  files: [objects.yaml]\n", 1);
        assert_ne!(more, GOOD);
        write(folder.path(), "strait.yaml", &more);
        let objects = "apiVersion: v1
kind: Service
metadata: {name: shop, namespace: web, labels: {istio.io/global: \"true\"}}
spec: {ports: [{name: http, port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: shop-1, namespace: web, labels: {kubernetes.io/service-name: shop}}
addressType: IPv4
ports: [{name: web, port: 8080}]
endpoints: [{addresses: [10.0.0.9]}]
";
        write(folder.path(), "objects.yaml", objects);
        let checked = check(folder.path()).await;
        let want = "objects.yaml:6: warning: the endpoints of web/shop here are not used: none of \
                    their ports has the name of one of its ports; write the Service's names into \
                    `ports[].name`\n";
        assert_eq!(checked.stderr, want);
        let want = "1 exposed service, 1 exported service by objects, 2 services and";
        assert!(checked.stdout.contains(want), "{}", checked.stdout);
        write(
            folder.path(),
            "objects.yaml",
            &objects.replace("name: web, port", "name: http, port"),
        );
        assert_eq!(check(folder.path()).await.stderr, "");
    });
}
