//! Limits of what the objects of one namespace take from others.

use super::*;

fn in_namespace(text: &str, namespace: &str) -> String {
    text.replace("namespace: app", &format!("namespace: {namespace}"))
}

#[test]
fn the_addresses_of_a_workload_are_bounded_however_many_endpoints_name_its_pod() {
    let pod = |index: u32, name: &str| {
        let ip = std::net::Ipv4Addr::from(0x0a01_0000 + index);
        format!("{{addresses: [{ip}], targetRef: {{kind: Pod, name: {name}}}}}")
    };
    let endpoints: Vec<_> = (0..5000).map(|index| pod(index, "one")).collect();
    let text = service("east", EXPORTED) + &slice("east", "", &endpoints.join(", "));
    let joined = joined(&text);
    let workloads = joined.mesh.workloads.sorted();
    assert_eq!(workloads.len(), 1);
    assert_eq!(workloads[0].addresses.len(), 16);
    assert_eq!(workloads[0].addresses[0].to_string(), "10.1.0.0");
    let one = (0..50).map(|ip| format!("10.2.0.{ip}")).collect::<Vec<_>>();
    let text = service("east", EXPORTED) + &slice("east", "", &at(&one.join(", ")));
    let joined = super::joined(&text);
    assert_eq!(joined.mesh.workloads.sorted()[0].addresses.len(), 16);
}

/// Returns an object with so many ports, the first of which is `http`, from 8080 on.
fn with_ports(text: &str, count: usize) -> String {
    let others = (8081..).take(count - 1).map(|port| format!(", {{name: p{port}, port: {port}}}"));
    let ports = format!("ports: [{{name: http, port: 8080}}{}]", others.collect::<String>());
    text.replace("ports: [{name: http, port: 80}]", &ports)
        .replace("ports: [{name: http, port: 8080}]", &ports)
}

#[test]
fn a_slice_with_too_many_ports_or_pairs_claims_few_addresses_and_gives_none_to_others() {
    let node = "---\napiVersion: v1\nkind: Node\nmetadata: {name: n}\n\
                status: {addresses: [{type: InternalIP, address: 10.0.0.1}]}\n";
    let small = [at("10.0.0.1"), at("10.0.0.2")].join(", ");
    let small = service("east", EXPORTED) + &slice("east", "", &small);
    let beyond = "the slice of app/hello is not used: slices have more than 1000000 pairs of an \
                  address and a port, and namespace app has the most of them; write fewer ports or \
                  endpoints";
    let invalid = "`object.ports` has more than 1024 items; write fewer ports";
    for (ports, endpoints, reported) in [(1025, 1, invalid), (1000, 1000, beyond)] {
        let mut big = vec![at("10.0.0.1"); endpoints];
        big.push(at("10.0.0.3"));
        let big = with_ports(&slice("east", "", &big.join(", ")), ports);
        let big = service("east", EXPORTED) + &big;
        let text = format!("{node}{big}{}", in_namespace(&small, "small"));
        let mut objects = Objects::default();
        let read = read::text(Path::new("o.yaml"), &text, &mut objects);
        let (held, mesh, config) = (AddressHolders::default(), Mesh::default(), config(JOIN, "{}"));
        let view =
            view::ObjectIndex::new(&objects, &config, &mut limited::LimitedFindings::default());
        let claims = addresses::AddressClaims::new(&view, &mesh, &held);
        // That of the small namespace to a port of the node is no better than one to all ports.
        assert_eq!(claims.endpoints.all().count(), 4, "{reported}");
        let joined = joined(&text);
        let uids: Vec<_> = joined.mesh.workloads.keys().collect();
        assert_eq!(uids.len(), 1, "{uids:?}");
        assert_eq!(&**uids[0], "east//Endpoint/small/east/10.0.0.2");
        let found = format!("{read}\n{}", joined.warnings);
        assert!(found.contains(reported), "{found}");
    }
}

#[test]
fn a_service_or_an_import_with_too_many_ports_is_invalid_and_keeps_its_address() {
    let import = "---\napiVersion: multicluster.x-k8s.io/v1alpha1\nkind: ServiceImport\n\
                  metadata: {name: hello, namespace: app}\n\
                  ports: [{name: http, port: 80}]\nips: [10.9.0.1]\n";
    let service = service("east", EXPORTED).replace("spec: {", "spec: {clusterIP: 10.9.0.1, ");
    let other = in_namespace(import, "other");
    // Number of addresses of the other namespace, and of exported names.
    let numbers = |text: &str| {
        let joined = joined(&format!("{text}{other}"));
        let of_other = joined.mesh.services.values().filter(|one| *one.namespace == *"other");
        (of_other.map(|one| one.vips.len()).sum::<usize>(), joined.scope.exported.len())
    };
    assert_eq!(numbers(""), (1, 0));
    assert_eq!(numbers(&with_ports(&service, 1024)), (0, 3));
    for text in [service.as_str(), import] {
        assert_eq!(numbers(&with_ports(text, 1025)), (0, 0), "{text}");
    }
    let ips = |count| {
        let ips = (1..count).map(|index| format!("10.8.{}.{}, ", index / 250, index % 250 + 1));
        import.replace("ips: [", &format!("ips: [{}", ips.collect::<String>()))
    };
    let vips = |of: &JoinResult| of.mesh.services.values().map(|one| one.vips.len()).sum::<usize>();
    assert_eq!([1024, 1025].map(|count| vips(&joined(&ips(count)))), [1024, 0]);
    assert_eq!(numbers(&ips(1025)), (0, 0));
}

#[test]
fn pods_at_the_address_of_their_node_stay_apart_and_take_an_unnamed_endpoint_in() {
    let pod = |index: u32| {
        format!("{{addresses: [10.0.0.1], targetRef: {{kind: Pod, name: web-{index}}}}}")
    };
    let mut endpoints = vec![at("10.0.0.1")];
    endpoints.extend((0..20_000).map(pod));
    endpoints.push(at("10.0.0.1"));
    let text = service("east", EXPORTED) + &slice("east", "", &endpoints.join(", "));
    let joined = joined(&text);
    assert_eq!(joined.mesh.workloads.len(), 20_000);
    let uids = joined.mesh.workloads.keys();
    assert!(uids.into_iter().all(|uid| uid.contains("//Pod/app/web-")));
}

#[test]
fn warnings_about_entries_of_the_operator_come_before_those_of_tenants() {
    let mut text = service("east", "istio.io/global: \"false\"");
    for index in 0..300 {
        let tenant = service("east", EXPORTED) + &slice("east", "", &at("10.0.0.1"));
        let tenant = tenant.replacen("ports: [{name: http, port: 8080}]", "ports: [{port: 1}]", 1);
        text += &in_namespace(&tenant, &format!("t{index}"));
    }
    let exposure = format!("{{services: [{{service: {OWN}, to: [{{anyone: true}}]}}]}}");
    let reported = joined_with(&text, &exposure).warnings;
    assert_eq!(reported.0.len(), 202);
    let first = reported.0[0].to_string();
    assert!(first.contains("is exposed to nobody"), "{first}");
    let last = reported.0[201].to_string();
    assert!(last.contains("100 more findings are omitted"), "{last}");
}

#[test]
fn a_namespace_with_many_findings_leaves_those_of_others() {
    // Findings of invalid objects, entries without effect, joined services, endpoints, addresses
    // and waypoints.
    let many = 300;
    let repeat = |text: &dyn Fn(usize) -> String| (0..many).map(text).collect::<String>();
    let named = |text: String, index: usize| text.replace("hello", &format!("hello{index}"));
    let of_first = |text: &dyn Fn(usize) -> String| repeat(text) + &in_namespace(&text(0), "zoo");
    let waypoint = "istio.io/use-waypoint: w, istio.io/use-waypoint-namespace: other";
    let foreign = "{addresses: [10.0.0.1], targetRef: {kind: Pod, namespace: x, name: p}}";
    let import = "---\napiVersion: multicluster.x-k8s.io/v1alpha1\nkind: ServiceImport\n\
                  metadata: {name: hello, namespace: app}\n\
                  ports: [{name: http, port: 80}]\nips: [10.9.0.1]\n";
    for text in [
        of_first(&|index| named(service("east", waypoint), index)),
        of_first(&|index| named(slice("east", "", foreign), index)),
        of_first(&|index| named(import.into(), index)),
        of_first(&|index| {
            named(slice("west", "", &at("10.0.0.1")), index)
                + &{ named(export("west", "2026-01-31T12:00:00Z"), index) }
        }),
    ] {
        let joined = joined(&text);
        let found = joined.warnings.0.iter().chain(&joined.conflicts.0);
        let found: Vec<_> = found.map(ToString::to_string).collect();
        assert_eq!(found.len(), 201, "{}", found[0]);
        let is_of_zoo = |text: &String| text.contains("zoo/hello0") || text.contains("hello0.zoo");
        assert!(found.iter().any(is_of_zoo), "{}", found[0]);
    }
    let folder = tempfile::tempdir().expect("a folder");
    let files = ["app", "zoo"].map(|namespace| {
        let file = folder.path().join(format!("{namespace}.yaml"));
        let invalid = in_namespace(&service("east", ""), namespace);
        let invalid = invalid.replace("port: 80", "port: none");
        std::fs::write(&file, invalid.repeat(200)).expect("a file");
        file
    });
    let (_, findings) = load(&files).expect("objects");
    let of = |findings: &Findings, namespace: &str| {
        let of = findings.0.iter().filter(|one| *one.namespace == *namespace);
        of.count()
    };
    assert_eq!((of(&findings, "app"), of(&findings, "zoo")), (101, 100));
}

/// Merges a text of objects. Returns the findings without the path of the file.
fn merged(config: &Config, text: &str) -> (Config, String) {
    let objects = objects(text);
    let (mut config, merged) = merge(config, &objects, &Mesh::default());
    let distributed = distribute(&mut config, &objects, None);
    (config, format!("{merged}\n{distributed}"))
}

/// Returns an object whose specification is a list of entries.
fn listing(kind: &str, metadata: &str, entries: impl Iterator<Item = String>) -> String {
    let (version, list) = match kind {
        "ServiceExpositionPolicy" => ("multicluster.istio.io", "exposed"),
        "RemoteServiceBinding" => ("multicluster.istio.io", "remote"),
        _ => ("admiral.io", "selector: {identity: echo}, policy"),
    };
    let entries: Vec<_> = entries.collect();
    format!(
        "apiVersion: {version}/v1alpha1\nkind: {kind}\nmetadata: {{{metadata}}}\n\
         spec: {{{list}: [{}]}}\n",
        entries.join(",\n")
    )
}

/// Returns a binding of ports of the service `a` of a cluster.
fn binding(metadata: &str, cluster: &str, ports: std::ops::Range<u16>) -> String {
    let service = |port| format!("{{cluster: {cluster}, services: [{{name: a, port: {port}}}]}}");
    listing("RemoteServiceBinding", metadata, ports.map(service))
}

#[test]
fn a_namespace_with_too_many_bindings_takes_no_place_of_another_one() {
    let config = config(MERGE, "{files: [Cargo.toml], bindings: {addresses: 127.0.0.1/32}}");
    let many = binding("name: remote, namespace: shop", "west", 1..301);
    let (alone, reported) = merged(&config, &many);
    assert_eq!(alone.bindings.len(), 256);
    let want =
        "error: objects have more than 256 bindings, and namespace shop has the most of them";
    assert_eq!(reported.matches(want).count(), 44, "{reported}");
    for other in ["app", "zoo"] {
        let one = binding(&format!("name: remote, namespace: {other}"), "west", 1000..1001);
        for text in [format!("{one}---\n{many}"), format!("{many}---\n{one}")] {
            let (merged, reported) = merged(&config, &text);
            assert_eq!(merged.bindings.len(), 256);
            let mut hosts = merged.bindings.iter().map(|one| &*one.service.host);
            assert!(hosts.any(|host| host == format!("a.{other}.svc.cluster.local")));
            assert_eq!(reported.matches(want).count(), 45, "{reported}");
        }
    }
}

#[test]
fn a_namespace_with_too_many_exposed_ports_takes_no_place_of_another_one() {
    let config = config(MERGE, "{files: [Cargo.toml]}");
    let ports: Vec<_> = (1..=100).collect();
    let many = (0..170).map(|at| {
        format!("{{name: s{at}, alias: s{at}.global, port: {ports:?}, clusters: [west]}}")
    });
    let of = |namespace: &str, month: u8| {
        format!(
            "name: a, namespace: {namespace}, creationTimestamp: \"2026-0{month}-01T00:00:00Z\""
        )
    };
    let many = listing("ServiceExpositionPolicy", &of("a-evil", 1), many);
    let one = "{name: echo, alias: pay.global, port: 80, clusters: [west]}".to_owned();
    let app = listing("ServiceExpositionPolicy", &of("app", 2), std::iter::once(one));
    let names = |config: &Config| {
        let services = config.exposure.services.iter();
        services.map(|one| (one.service.clone(), one.names.clone())).collect::<Vec<_>>()
    };
    let (first, reported) = merged(&config, &format!("{many}---\n{app}"));
    let (second, _) = merged(&config, &format!("{app}---\n{many}"));
    assert_eq!(names(&first), names(&second), "in any order of files");
    let open = first.exposure.services.iter();
    let (open, closed): (Vec<_>, Vec<_>) = open.partition(|one| !one.to.is_empty());
    assert_eq!(open.len(), 16_384);
    assert_eq!(open[16_383].namespace.as_deref(), Some("app"));
    // Services without any port in use stay closed.
    assert_eq!(closed.len(), 170 - 164);
    let want = "objects expose more than 16384 ports of services, and namespace a-evil has the";
    assert_eq!(reported.matches(want).count(), 7, "{reported}");
}

#[test]
fn a_binding_beyond_the_limit_stays_out_with_the_younger_donors_of_its_service() {
    let config = config(MERGE, "{files: [Cargo.toml], bindings: {addresses: 127.0.0.1/32}}");
    let text = [
        binding("name: a, namespace: shop", "west", 1..301),
        binding("name: b, namespace: shop", "north", 1..301),
        binding("name: c, namespace: zoo", "west", 1001..1101),
    ];
    let (merged, _) = merged(&config, &text.join("---\n"));
    assert_eq!(merged.bindings.len(), 256);
    for binding in &merged.bindings {
        let is_shared = binding.service.host.contains("shop");
        assert_eq!(binding.cluster.len(), if is_shared { 2 } else { 1 });
        assert_eq!(binding.objects.len(), binding.cluster.len());
    }
}

#[test]
fn a_namespace_with_too_many_policies_takes_no_place_of_another_one() {
    let policies = |count: usize, namespace: &str| {
        let names = (0..count).map(|index| format!("{{dns: n{index}.{namespace}.global}}"));
        let names: Vec<_> = names.collect();
        let parts = names.chunks(1000).enumerate().map(|(part, names)| {
            let metadata = format!("name: gtp{part}, namespace: {namespace}");
            listing("GlobalTrafficPolicy", &metadata, names.iter().cloned())
        });
        parts.collect::<Vec<_>>().join("---\n")
    };
    let mut config = config(MERGE, "{files: [Cargo.toml]}");
    let text = format!("{}---\n{}", policies(5000, "payments"), policies(1, "shop"));
    let findings = distribute(&mut config, &objects(&text), Some(&Mesh::default()));
    assert_eq!(config.traffic.len(), 4096);
    let (last, others) = config.traffic.split_last().expect("entries");
    assert_eq!(last.namespace.as_deref(), Some("shop"));
    let newest = others.last().and_then(|one| one.service.as_deref());
    assert_eq!(newest, Some("n4094.payments.global"));
    assert_eq!(findings.0.len(), 201);
    let want = "objects have more than 4096 distributions, and namespace payments has the most";
    assert!(findings.0[0].what.contains(want), "{findings}");
}

#[test]
fn a_policy_with_too_many_items_closes_its_namespace_and_keeps_its_alias() {
    let policy = |metadata: &str, items: Vec<String>| {
        listing("ServiceExpositionPolicy", metadata, items.into_iter())
    };
    let last = "{name: hello, alias: pay.global, clusters: [west]}".to_owned();
    let items = |count| (0..count).map(|index| format!("{{name: s{index}, clusters: [west]}}"));
    let old = "name: a, namespace: app, creationTimestamp: \"2026-01-01T00:00:00Z\"";
    let other = policy("name: b, namespace: shop", vec![last.clone()]);
    let merging = config(MERGE, "{files: [Cargo.toml]}");
    for (count, exported, entries) in [(999, 3, 1001), (45_000, 0, 2)] {
        let many = policy(old, items(count).chain([last.clone()]).collect());
        let text = format!("{many}---\n{other}{}", service("east", EXPORTED));
        assert_eq!(objects(&text).bytes(), entries * ITEM_BYTES);
        assert_eq!(joined(&text).scope.exported.len(), exported);
        let (config, reported) = merged(&merging, &text);
        assert_eq!(config.exposure.services.len(), entries);
        let named = config.exposure.services.iter().filter(|one| !one.names.is_empty());
        let named: Vec<_> = named.map(|one| (one.namespace.as_deref(), one.to.len())).collect();
        assert_eq!(named, [(Some("app"), usize::from(exported > 0))]);
        assert!(reported.contains("the alias pay.global is that of "), "{reported}");
    }
}

#[test]
fn an_object_with_too_many_items_is_invalid_and_keeps_few_of_them() {
    let names = |count: u16| (0..count).map(|index| format!("{{dns: n{index}.app.global}}"));
    let of = |metadata: &str, count| listing("GlobalTrafficPolicy", metadata, names(count));
    let metadata = "name: a, namespace: app";
    let two = "{cluster: west, services: [{name: a, port: 1}, {name: b, port: 1}]}".to_owned();
    let nested = vec![two; 501].into_iter();
    for (text, kept) in [
        (of(metadata, 1000), 1000),
        (of(metadata, 1001), 0),
        (binding(metadata, "west", 1..1001), 1000),
        (binding(metadata, "west", 1..1002), 0),
        (listing("RemoteServiceBinding", metadata, nested), 0),
    ] {
        let mut objects = Objects::default();
        let found = read::text(Path::new("o.yaml"), &text, &mut objects).to_string();
        assert_eq!(objects.bytes(), kept * ITEM_BYTES, "{found}");
        let is_invalid = found.contains("; write the others into another object");
        assert_eq!(is_invalid, kept == 0, "{found}");
    }
}
