//! Status page as text, from its JSON.

use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::{has_no_mesh, list};
use crate::admin::text::{BOLD, GREEN, RED, Text, cell, key};

/// Maximum number of rejected resources of each type; the dump has more of them.
const REJECTIONS_SHOWN: usize = 10;
/// Maximum number of hostnames, and of routes of listeners.
const ROWS_SHOWN: usize = 50;
/// Maximum number of gateways of other networks.
const GATEWAYS_SHOWN: usize = 50;
/// Maximum number of issuers.
const ISSUERS_SHOWN: usize = 20;

/// Formats the page. `one` is true if services were requested by name.
pub(super) fn page(page: &Value, one: bool, color: bool) -> String {
    let mut text = Text::new(color);
    let at = humantime::parse_rfc3339(&cell(&page["at"]));
    let at = at.unwrap_or(SystemTime::UNIX_EPOCH);
    summary(&mut text, page);
    if one {
        for service in list(&page["services"]["list"]) {
            write_service(&mut text, service);
        }
        return text.finish();
    }
    let problems = list(&page["problems"]);
    if !problems.is_empty() {
        text.line("");
        text.raw_line(&text.paint(RED, "Problems"));
        for problem in problems {
            text.line(&format!("  {}", cell(problem)));
        }
    }
    let evacuated = list(&page["evacuated"]);
    if !evacuated.is_empty() {
        text.heading("Operator", "until a restart");
    }
    for region in evacuated.iter().map(cell) {
        let undo = format!("`strait drain region {region} --undo` puts it back");
        text.line(&format!("  {region} is evacuated; {undo}"));
    }
    listeners(&mut text, list(&page["listeners"]));
    let source = &page["source"];
    let (kind, place) = (cell(&source["kind"]), cell(&source["place"]));
    text.heading("Discovery", &format!("{kind} {place}"));
    if !source["stream"].is_null() {
        write_stream(&mut text, &source["stream"], at);
    }
    certificates(&mut text, page, at);
    gateways(&mut text, page, GATEWAYS_SHOWN);
    inputs(&mut text, page, at);
    services(&mut text, &page["services"]);
    text.finish()
}

fn summary(text: &mut Text, page: &Value) {
    let state = if page["ready"] == true {
        text.paint(GREEN, "ready")
    } else {
        let pending = joined(&page["pending"], ", ");
        format!("{}, pending: {pending}", text.paint(RED, "not ready"))
    };
    let (strait, version) = (text.paint(BOLD, "strait"), cell(&page["version"]));
    text.raw_line(&format!("{strait} {version}  {state}"));
    let mesh = &page["mesh"];
    let mesh = if has_no_mesh(page) {
        "no mesh yet".to_owned()
    } else {
        let services = count(&mesh["services"], "service", "services");
        let workloads = count(&mesh["workloads"], "workload", "workloads");
        let policies = count(&mesh["policies"], "policy", "policies");
        let snapshot = &page["snapshot"];
        format!("snapshot {snapshot}: {services}, {workloads}, {policies}")
    };
    let locality = &page["locality"];
    let locality = match &*cell(&locality["origin"]) {
        "" => "locality unknown".to_owned(),
        origin => {
            let parts = ["region", "zone", "subzone"].map(|part| cell(&locality[part]));
            let parts = parts.join("/");
            format!("locality {} ({origin})", parts.trim_end_matches('/'))
        }
    };
    let (cluster, network) = (cell(&page["cluster"]), cell(&page["network"]));
    text.line(&format!("cluster {cluster}, network {network}, {locality}; {mesh}"));
}

fn listeners(text: &mut Text, listeners: &[Value]) {
    text.heading("Listeners", "");
    let routed = |row: &Value| match (&row["route_by"], &row["routing"]) {
        (Value::Null, Value::Null) if !row["service"].is_null() => "to one service".to_owned(),
        (Value::Null, Value::Null) => "by its routes".to_owned(),
        (Value::Null, routing) => cell(routing),
        (route_by, _) => format!("by {}", cell(route_by)),
    };
    let sources = |row: &Value| match &*joined(&row["sources"], ", ") {
        "" => "every address".to_owned(),
        sources => sources.to_owned(),
    };
    let state = |row: &Value| match &*cell(&row["state"]) {
        "waiting" => "waits for a certificate".to_owned(),
        "failed" => "failed, see Problems".to_owned(),
        state => state.to_owned(),
    };
    text.table(
        listeners,
        &[
            ("NAME", &key("name")),
            ("ADDRESS", &key("address")),
            ("PROTOCOL", &key("protocol")),
            ("ROUTED", &routed),
            ("SOURCES", &sources),
            ("STATE", &state),
        ],
    );
    let in_use = listeners.iter().filter(|row| {
        let state = &row["state"];
        *state == "open" || *state == "waiting"
    });
    let reachable: Vec<_> = in_use.flat_map(reachable_services).collect();
    text.table_up_to(
        ROWS_SHOWN,
        &reachable,
        &[
            ("THROUGH", &key("through")),
            ("ASKED FOR BY", &key("asked")),
            ("REACHED", &key("reached")),
            ("BY", &key("by")),
        ],
    );
}

/// Returns the rows of the services that are reachable through a listener.
fn reachable_services(listener: &Value) -> Vec<Value> {
    let from = match &*joined(&listener["sources"], ", ") {
        "" => String::new(),
        sources => format!(" from {sources}"),
    };
    let row = |requested: &str, reached: &str, by: &str| {
        let by = format!("{by}{from}");
        json!({ "through": listener["name"], "asked": requested, "reached": reached, "by": by })
    };
    if !listener["route_by"].is_null() {
        let reached = "services by their exposure";
        return vec![row("any authority", reached, "the trust set")];
    }
    if !listener["routing"].is_null() {
        let reached = "services exposed to anyone";
        return vec![row("outbound_.PORT_._.HOST", reached, "anyone")];
    }
    if !listener["service"].is_null() {
        let clusters = joined(&listener["cluster"], ", ");
        let reached = format!("{} of {clusters}", cell(&listener["service"]));
        let requested = match &*joined(&listener["names"], ", ") {
            "" => "any connection".to_owned(),
            names => format!("any connection, as {names}"),
        };
        let clients: Vec<_> = list(&listener["to"]).iter().map(audience).collect();
        let clients = match &*clients {
            [] => "anyone".to_owned(),
            clients => clients.join("; "),
        };
        return vec![row(&requested, &reached, &clients)];
    }
    let routes = list(&listener["routes"]).iter();
    let rows = routes.map(|route| {
        let requested = joined(&route["sni"], ", ");
        row(&requested, &cell(&route["to"]), "anyone")
    });
    rows.collect()
}

/// Formats an entry of a binding's `to`.
fn audience(to: &Value) -> String {
    if to["anyone"] == true {
        return "the trust set".to_owned();
    }
    let cluster = match &to["cluster"] {
        Value::Null => "any cluster".to_owned(),
        cluster => format!("cluster {}", cell(cluster)),
    };
    let keys = [("namespaces", "namespace"), ("service_accounts", "account")];
    let named = keys.map(|(key, name)| match &*joined(&to[key], " or ") {
        "" => String::new(),
        values => format!(", {name} {values}"),
    });
    cluster + &named.concat()
}

fn write_stream(text: &mut Text, stream: &Value, now: SystemTime) {
    let is_connected = stream["connected"] == true;
    let since = match &stream["since"] {
        Value::Null => String::new(),
        since => format!(" since {} ({})", cell(since), ago(now, since)),
    };
    let not = if is_connected { "" } else { "not " };
    text.line(&format!("  {not}connected{since}"));
    if !is_connected && !stream["why"].is_null() {
        text.line(&format!("  {}", cell(&stream["why"])));
        let next = humantime::parse_rfc3339(&cell(&stream["nextTry"])).ok();
        let next = next.and_then(|next| next.duration_since(now).ok());
        let next = next.map_or_else(|| "now".to_owned(), |wait| format!("in {}s", wait.as_secs()));
        let tried = count(&stream["retries"], "time", "times");
        text.line(&format!("  tried {tried}, next {next}"));
    }
    if !stream["saved"].is_null() {
        let (saved, ago) = (cell(&stream["saved"]), ago(now, &stream["saved"]));
        text.line(&format!("  state on disk of {saved} ({ago})"));
    }
    let synced = |kind: &Value| {
        let synced = kind["synced"] == true;
        if synced { "synced" } else { "pending" }.to_owned()
    };
    let version = |kind: &Value| match &*cell(&kind["version"]) {
        "" => format!("({})", count(&kind["responses"], "response", "responses")),
        version => version.to_owned(),
    };
    let types = list(&stream["types"]);
    text.table(
        types,
        &[
            ("TYPE", &key("name")),
            ("STATE", &synced),
            ("HELD", &key("held")),
            ("REJECTED", &super::problems::format_rejected),
            ("NACKS", &key("nacks")),
            ("VERSION", &version),
            ("LAST ACCEPTED", &|kind| ago(now, &kind["accepted"])),
        ],
    );
    for kind in types {
        rejections(text, kind, now);
    }
}

fn rejections(text: &mut Text, kind: &Value, now: SystemTime) {
    let (of, see) = (cell(&kind["name"]), ", see `strait dump`");
    let more = |count: &Value| {
        let count = count.as_u64().and_then(|count| usize::try_from(count).ok());
        count.unwrap_or(0).saturating_sub(REJECTIONS_SHOWN)
    };
    for rejection in list(&kind["rejections"]).iter().take(REJECTIONS_SHOWN) {
        let [name, reason, version] =
            ["name", "reason", "version"].map(|key| cell(&rejection[key]));
        let name = if name.is_empty() { "(no name)" } else { &name };
        let version = match version.as_str() {
            "" => String::new(),
            version => format!("version {version}, "),
        };
        let since = ago(now, &rejection["since"]);
        text.line(&format!("  rejected of {of}: {name}: {reason} ({version}{since})"));
    }
    text.more(more(&kind["rejected"]), see);
    for unused in list(&kind["unusedFirst"]).iter().take(REJECTIONS_SHOWN) {
        let [name, why] = ["name", "why"].map(|key| cell(&unused[key]));
        text.line(&format!("  not used of {of}: {name}: {why}"));
    }
    text.more(more(&kind["unused"]), see);
}

/// Writes our certificates, the revocation lists, and the issuers of peers' certificates.
fn certificates(text: &mut Text, page: &Value, now: SystemTime) {
    text.heading("Certificates", "");
    let own = list(&page["certificates"]).iter().map(|row| {
        let expires = match until(now, &row["expires"]) {
            Some(left) => format!("{left} ({})", cell(&row["expires"])),
            None => cell(&row["expires"]),
        };
        let (identity, state) = (&row["identity"], &row["state"]);
        [cell(identity), cell(state), cell(&row["serial"]), expires]
    });
    let crls = list(&page["crls"]).iter().map(|row| {
        let name = format!("CRL of {} ({})", cell(&row["issuer"]), cell(&row["file"]));
        let state = if row["stale"] == true { "Stale" } else { "Available" };
        let number = row["number"].as_str().unwrap_or_default().to_owned();
        [name, state.to_owned(), number, cell(&row["nextUpdate"])]
    });
    text.table(
        &own.chain(crls).collect::<Vec<_>>(),
        &[
            ("IDENTITY", &|[identity, ..]| identity.clone()),
            ("STATE", &|[_, state, ..]| state.clone()),
            ("SERIAL", &|[_, _, serial, _]| serial.clone()),
            ("EXPIRES", &|[.., expires]| expires.clone()),
        ],
    );
    let issuers = list(&page["issuers"]);
    if issuers.is_empty() {
        return;
    }
    text.heading("Issuers of peers", "");
    text.table_up_to(
        ISSUERS_SHOWN,
        issuers,
        &[
            ("SPKI SHA-256", &key("spki")),
            ("SUBJECT", &key("subject")),
            ("CLUSTER", &key("cluster")),
            ("ACCEPTED", &key("accepted")),
            ("REFUSED", &key("refused")),
        ],
    );
}

/// Writes at most `max` gateways of other networks.
pub(super) fn gateways(text: &mut Text, page: &Value, max: usize) {
    let gateways = list(&page["gateways"]);
    if gateways.is_empty() {
        return;
    }
    text.heading("Gateways of other networks", "");
    text.table_up_to(
        max,
        gateways,
        &[
            ("ADDRESS", &key("address")),
            ("NETWORK", &key("network")),
            ("STATE", &key("state")),
            ("RTT", &key("rtt")),
            ("SHARE", &key("share")),
            ("TUNNELS", &key("tunnels")),
            ("EJECTIONS", &key("ejections")),
            ("IDENTITY", &key("identity")),
            ("EXPIRES", &key("expires")),
            ("LAST ERROR", &key("error")),
        ],
    );
}

/// Writes the reloads, the hostnames with failing ones first, and the shares of resources.
fn inputs(text: &mut Text, page: &Value, now: SystemTime) {
    let reloads = list(&page["reloads"]);
    if !reloads.is_empty() {
        text.heading("Changes read", "");
        let result = |row: &Value| {
            let result = match (&row["error"], row["inUse"] == true) {
                (Value::Null, _) => "in use",
                (_, true) => "in use except for a part, see Problems",
                (_, false) => "rejected, see Problems; the previous state is in use",
            };
            result.to_owned()
        };
        text.table(
            reloads,
            &[("SOURCE", &key("what")), ("READ", &|row| ago(now, &row["at"])), ("RESULT", &result)],
        );
    }
    let mut hosts: Vec<_> = list(&page["hosts"]["list"]).iter().collect();
    if !hosts.is_empty() {
        text.heading("Hostnames", "");
        hosts.sort_by_key(|host| host["error"].is_null());
        let addresses = |host: &&Value| {
            let more = if host["more"] == 0 { "" } else { " and more" };
            cell(&host["addresses"]) + more
        };
        text.table_up_to(
            ROWS_SHOWN,
            &hosts,
            &[
                ("NAME", &|host| cell(&host["name"])),
                ("ANSWERED", &|host| ago(now, &host["answered"])),
                ("LAST ERROR", &|host| cell(&host["error"])),
                ("ADDRESSES", &addresses),
            ],
        );
    }
    shares(text, page);
}

/// Writes the largest holders of each resource.
fn shares(text: &mut Text, page: &Value) {
    let holders: Vec<_> = list(&page["shares"])
        .iter()
        .flat_map(|usage| list(&usage["holders"]).iter().map(move |holder| (usage, holder)))
        .collect();
    if holders.is_empty() {
        return;
    }
    text.heading("Shares", "");
    let used = |usage: &Value| match &usage["max"] {
        Value::Null => cell(&usage["used"]),
        max => format!("{} of {max}", usage["used"]),
    };
    text.table_up_to(
        ROWS_SHOWN,
        &holders,
        &[
            ("RESOURCE", &|(usage, _)| cell(&usage["resource"])),
            ("OF", &|(usage, _)| cell(&usage["of"])),
            ("USED", &|(usage, _)| used(usage)),
            ("HOLDER", &|(_, holder)| cell(&holder["source"])),
            ("HELD", &|(_, holder)| cell(&holder["held"])),
        ],
    );
}

fn services(text: &mut Text, services: &Value) {
    text.heading("Services", "");
    let rows = list(&services["list"]);
    text.table(
        rows,
        &[
            ("SERVICE", &key("service")),
            ("PORTS", &key("ports")),
            ("ENDPOINTS USED", &|row| format!("{} of {}", row["used"], row["total"])),
            ("TUNNELS", &key("tunnels")),
            ("EXPOSED TO", &|row| joined(&row["exposedTo"], "; ")),
        ],
    );
    let (shown, total) = (rows.len(), &services["total"]);
    if *total != shown {
        let see = "see one by `strait status SERVICE`, all by --all";
        text.line(&format!("  {shown} of {total} services; {see}"));
    }
}

/// Writes one service with its endpoints.
fn write_service(text: &mut Text, service: &Value) {
    text.heading("Service", &cell(&service["service"]));
    for peers in list(&service["exposedTo"]) {
        text.line(&format!("  exposed to {}", cell(peers)));
    }
    let total = count(&service["total"], "workload", "workloads");
    text.line(&format!("  {} of {total} used", service["used"]));
    let state = |row: &Value| match &row["unused"] {
        Value::Null => "used".to_owned(),
        why => format!("not used: {}", cell(why)),
    };
    text.table(
        list(&service["endpoints"]),
        &[
            ("PORT", &key("port")),
            ("WORKLOAD", &key("uid")),
            ("ADDRESS", &key("address")),
            ("WEIGHT", &key("weight")),
            ("TUNNELS", &key("tunnels")),
            ("STATE", &state),
        ],
    );
    let more = service["more"].as_u64().unwrap_or(0);
    text.more(usize::try_from(more).unwrap_or(0), "; see all by --all");
}

fn joined(values: &Value, separator: &str) -> String {
    let values: Vec<_> = list(values).iter().map(cell).collect();
    values.join(separator)
}

fn count(of: &Value, one: &str, more: &str) -> String {
    format!("{of} {}", if *of == 1 { one } else { more })
}

/// Formats the time since `at`; `never` for a time that is null.
fn ago(now: SystemTime, at: &Value) -> String {
    let Ok(at) = humantime::parse_rfc3339(&cell(at)) else {
        return "never".to_owned();
    };
    match now.duration_since(at).unwrap_or_default().as_secs() {
        0 => "just now".to_owned(),
        seconds => format!("{} ago", span(seconds)),
    }
}

/// Formats the time until `at`; none if that is not RFC 3339.
fn until(now: SystemTime, at: &Value) -> Option<String> {
    let end = humantime::parse_rfc3339(at.as_str()?).ok()?;
    Some(match end.duration_since(now) {
        Ok(left) => format!("in {}", span(left.as_secs())),
        Err(_) => ago(now, at),
    })
}

/// Formats the two largest units of a duration.
fn span(seconds: u64) -> String {
    let exact = humantime::format_duration(Duration::from_secs(seconds)).to_string();
    let units: Vec<_> = exact.split(' ').take(2).collect();
    units.join(" ")
}
